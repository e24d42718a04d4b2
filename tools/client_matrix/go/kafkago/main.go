// segmentio/kafka-go for the matrix of clients.
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/segmentio/kafka-go"
	"oncelog.test/clientmatrix/commands"
)

const noTransactions = commands.Missing("Writer has no transactions; only its low-level Client has their requests")

type client struct {
	writers map[string]*kafka.Writer // by topic and partition
	reader  *kafka.Reader
}

func (c *client) Producer(kind, argument string) error {
	switch kind {
	case "idempotent", "give-up":
		return commands.Missing("Writer has no setting for idempotence")
	case "transactional":
		return noTransactions
	}
	c.writers = map[string]*kafka.Writer{}
	return nil
}

func (c *client) Send(topic string, partition int32, value string, done func(error)) {
	key := fmt.Sprint(topic, " ", partition)
	writer := c.writers[key]
	if writer == nil {
		toPartition := kafka.BalancerFunc(func(kafka.Message, ...int) int { return int(partition) })
		// The defaults of 3 to 10 s are too short for a busy machine: the writer gives up, and no batch is sent.
		writer = &kafka.Writer{
			Addr: kafka.TCP(os.Args[1]), Topic: topic, Balancer: toPartition, BatchSize: 1,
			ReadTimeout: commands.ReadLimit, WriteTimeout: commands.ReadLimit,
			Transport: &kafka.Transport{DialTimeout: commands.ReadLimit},
		}
		c.writers[key] = writer
	}
	go func() { done(writer.WriteMessages(context.Background(), kafka.Message{Value: []byte(value)})) }()
}

func (c *client) Begin() error                { return noTransactions }
func (c *client) Commit() error               { return noTransactions }
func (c *client) Abort() error                { return noTransactions }
func (c *client) Offsets(string, int64) error { return noTransactions }

func (c *client) Consume(topic, group string, count int, isolation, protocol, instance string) ([]string, error) {
	if protocol == "consumer" {
		return nil, commands.Missing("ReaderConfig has no setting for the group protocol")
	}
	if instance != "-" {
		return nil, commands.Missing("ReaderConfig has no group.instance.id")
	}
	settings := kafka.ReaderConfig{
		Brokers: []string{os.Args[1]}, Topic: topic, GroupID: group, StartOffset: kafka.FirstOffset,
		MaxWait: 200 * time.Millisecond,
	}
	if isolation == "read_committed" {
		settings.IsolationLevel = kafka.ReadCommitted
	}
	c.reader = kafka.NewReader(settings)
	ctx, cancel := context.WithTimeout(context.Background(), commands.ReadLimit)
	defer cancel()
	var values []string
	for len(values) < count && ctx.Err() == nil {
		message, err := c.reader.FetchMessage(ctx)
		if err != nil {
			return values, err
		}
		values = append(values, string(message.Value))
	}
	return values, nil
}

func (c *client) Close() error { return c.reader.Close() }

func main() { commands.Serve("github.com/segmentio/kafka-go", &client{}) }
