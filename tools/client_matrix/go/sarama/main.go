// sarama for the matrix of clients.
package main

import (
	"context"
	"os"
	"time"

	"github.com/IBM/sarama"
	"oncelog.test/clientmatrix/commands"
)

type client struct {
	producer sarama.AsyncProducer
	consumer sarama.ConsumerGroup
	session  sarama.ConsumerGroupSession
	group    string
	records  chan string
}

func config() *sarama.Config {
	settings := sarama.NewConfig()
	settings.Version = sarama.MaxVersion // the default is an older version of the protocol
	settings.Producer.Return.Successes = true
	settings.Producer.Partitioner = sarama.NewManualPartitioner
	return settings
}

func idempotent() *sarama.Config {
	settings := config()
	settings.Producer.Idempotent = true
	settings.Producer.RequiredAcks = sarama.WaitForAll
	settings.Net.MaxOpenRequests = 1 // which sarama requires
	settings.Producer.Flush.MaxMessages = 1
	return settings
}

func (c *client) Producer(kind, argument string) (err error) {
	settings := idempotent()
	switch kind {
	case "default":
		settings = sarama.NewConfig()
		settings.Producer.Return.Successes = true
		settings.Producer.Partitioner = sarama.NewManualPartitioner
	case "give-up":
		settings.Producer.Retry.Max = 3
		settings.Producer.Retry.Backoff = time.Duration(commands.Number(argument)/3) * time.Millisecond
	case "transactional":
		settings.Producer.Transaction.ID = argument
	}
	c.producer, err = sarama.NewAsyncProducer([]string{os.Args[1]}, settings)
	if err != nil {
		return err
	}
	go func() {
		for message := range c.producer.Successes() {
			message.Metadata.(func(error))(nil)
		}
	}()
	go func() {
		for failed := range c.producer.Errors() {
			failed.Msg.Metadata.(func(error))(failed.Err)
		}
	}()
	return nil
}

func (c *client) Send(topic string, partition int32, value string, done func(error)) {
	c.producer.Input() <- &sarama.ProducerMessage{
		Topic: topic, Partition: partition, Value: sarama.StringEncoder(value), Metadata: done,
	}
}

func (c *client) Begin() error  { return c.producer.BeginTxn() }
func (c *client) Commit() error { return c.producer.CommitTxn() }
func (c *client) Abort() error  { return c.producer.AbortTxn() }

func (c *client) Offsets(topic string, offset int64) error {
	offsets := map[string][]*sarama.PartitionOffsetMetadata{topic: {{Partition: 0, Offset: offset}}}
	metadata := sarama.NewConsumerGroupMetadataFromSession(c.session, c.group, nil)
	return c.producer.AddOffsetsToTxnWithGroupMetadata(offsets, metadata)
}

func (c *client) Setup(session sarama.ConsumerGroupSession) error {
	c.session = session
	return nil
}

func (c *client) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (c *client) ConsumeClaim(_ sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for message := range claim.Messages() {
		c.records <- string(message.Value)
	}
	return nil
}

func (c *client) Consume(topic, group string, count int, isolation, protocol, instance string) ([]string, error) {
	if protocol == "consumer" {
		return nil, commands.Missing("Config has no setting for the group protocol")
	}
	settings := config()
	settings.Consumer.Offsets.Initial = sarama.OffsetOldest
	settings.Consumer.Offsets.AutoCommit.Enable = false
	if isolation == "read_committed" {
		settings.Consumer.IsolationLevel = sarama.ReadCommitted
	}
	if instance != "-" {
		settings.Consumer.Group.InstanceId = instance
	}
	var err error
	c.consumer, err = sarama.NewConsumerGroup([]string{os.Args[1]}, group, settings)
	if err != nil {
		return nil, err
	}
	c.group, c.records = group, make(chan string, 1000)
	failed := make(chan error, 1)
	go func() { failed <- c.consumer.Consume(context.Background(), []string{topic}, c) }()
	var values []string
	limit := time.After(commands.ReadLimit)
	for len(values) < count {
		select {
		case value := <-c.records:
			values = append(values, value)
		case err := <-failed:
			return values, err
		case <-limit:
			return values, nil
		}
	}
	return values, nil
}

func (c *client) Close() error { return c.consumer.Close() }

func main() { commands.Serve("github.com/IBM/sarama", &client{}) }
