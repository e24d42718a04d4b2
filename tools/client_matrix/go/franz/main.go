// franz-go for the matrix of clients.
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"oncelog.test/clientmatrix/commands"
)

const callLimit = 20 * time.Second

type client struct {
	producer *kgo.Client
	consumer *kgo.Client
	session  *kgo.GroupTransactSession
	id       string // the transactional id
}

func (c *client) options(more ...kgo.Opt) []kgo.Opt {
	// The values are padded, so a batch holds one of them.
	alone := []kgo.Opt{kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerBatchMaxBytes(600)}
	alone = append(alone, kgo.ProducerBatchCompression(kgo.NoCompression()), kgo.ProducerLinger(0))
	return append(append(alone, kgo.SeedBrokers(os.Args[1])), more...)
}

func (c *client) Producer(kind, argument string) (err error) {
	options := c.options()
	switch kind {
	case "default":
		options = []kgo.Opt{kgo.SeedBrokers(os.Args[1]), kgo.RecordPartitioner(kgo.ManualPartitioner())}
	case "give-up":
		limit := time.Duration(commands.Number(argument)) * time.Millisecond
		options = c.options(kgo.RecordDeliveryTimeout(limit))
	case "transactional":
		c.id = argument
		options = c.options(kgo.TransactionalID(argument))
	}
	c.producer, err = kgo.NewClient(options...)
	if err == nil && kind == "transactional" {
		ctx, cancel := context.WithTimeout(context.Background(), callLimit)
		defer cancel()
		_, _, err = c.producer.ProducerID(ctx)
	}
	return err
}

func (c *client) Send(topic string, partition int32, value string, done func(error)) {
	record := &kgo.Record{Topic: topic, Partition: partition, Value: fmt.Appendf(nil, "%-400s", value)}
	c.producer.Produce(context.Background(), record, func(_ *kgo.Record, err error) { done(err) })
}

func (c *client) Begin() error {
	if c.session != nil {
		return c.session.Begin()
	}
	return c.producer.BeginTransaction()
}

func (c *client) Commit() error { return c.end(kgo.TryCommit) }
func (c *client) Abort() error  { return c.end(kgo.TryAbort) }

func (c *client) end(how kgo.TransactionEndTry) error {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	if c.session != nil {
		_, err := c.session.End(ctx, how)
		return err
	}
	if err := c.producer.Flush(ctx); err != nil {
		return err
	}
	return c.producer.EndTransaction(ctx, how)
}

// Offsets does nothing: a GroupTransactSession adds the offsets of what it has read when it commits.
func (c *client) Offsets(string, int64) error { return nil }

func (c *client) Consume(topic, group string, count int, isolation, protocol, instance string) ([]string, error) {
	options := c.options(kgo.ConsumerGroup(group), kgo.ConsumeTopics(topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	if isolation == "read_committed" {
		options = append(options, kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	}
	if instance != "-" {
		options = append(options, kgo.InstanceID(instance))
	}
	if protocol == "consumer" {
		// franz-go offers KIP-848 to programs that opt in by this value of the client's context.
		ctx := context.WithValue(context.Background(), "opt_in_kafka_next_gen_balancer_beta", true)
		options = append(options, kgo.WithContext(ctx))
	}
	if err := c.join(options); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), commands.ReadLimit)
	defer cancel()
	var values []string
	for len(values) < count && ctx.Err() == nil {
		c.consumer.PollFetches(ctx).EachRecord(func(r *kgo.Record) { values = append(values, string(r.Value)) })
	}
	return values, nil
}

func (c *client) join(options []kgo.Opt) (err error) {
	if c.id == "" {
		c.consumer, err = kgo.NewClient(append(options, kgo.DisableAutoCommit())...)
		return err
	}
	c.producer.Close()
	c.session, err = kgo.NewGroupTransactSession(append(options, kgo.TransactionalID(c.id))...)
	if err == nil {
		c.producer, c.consumer = c.session.Client(), c.session.Client()
	}
	return err
}

func (c *client) Close() error {
	c.consumer.Close()
	return nil
}

func main() { commands.Serve("github.com/twmb/franz-go", &client{}) }
