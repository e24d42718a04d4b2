// franz-go against a broker: `check BOOTSTRAP everything`, `check BOOTSTRAP load TOPIC COUNT`, or transactions.go.
// Prints a line for each thing that was found to work; anything else ends it with exit code 1.
package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	switch os.Args[2] {
	case "load":
		load(ctx, os.Args[3], number(os.Args[4]))
		return
	case "transactions":
		transactions(ctx)
		return
	case "pipe":
		pipe(ctx, os.Args[3], os.Args[4], os.Args[5], int64(number(os.Args[6])))
		return
	}
	client := connect()
	defer client.Close()
	admin := kadm.NewClient(client)
	topics(ctx, admin)
	for name, codec := range map[string]kgo.CompressionCodec{
		"none": kgo.NoCompression(), "gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(),
		"lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
	} {
		roundTrip(ctx, admin, name, codec)
	}
	fmt.Println("codecs")
	offsets(ctx, admin)
}

func number(text string) int {
	found, err := strconv.Atoi(text)
	must(err)
	return found
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func check(holds bool, what ...any) {
	if !holds {
		panic(fmt.Sprint(what...))
	}
}

func connect(options ...kgo.Opt) *kgo.Client {
	client, err := kgo.NewClient(append(options, kgo.SeedBrokers(os.Args[1]))...)
	must(err)
	return client
}

func topics(ctx context.Context, admin *kadm.Client) {
	value := "9000"
	_, err := admin.CreateTopic(ctx, 2, 1, map[string]*string{"retention.ms": &value}, "go")
	must(err)
	_, err = admin.CreateTopic(ctx, 2, 1, nil, "go")
	check(err == kerr.TopicAlreadyExists, err)
	grown, err := admin.UpdatePartitions(ctx, 3, "go")
	must(err)
	must(grown.Error())
	listed, err := admin.ListTopics(ctx, "go")
	must(err)
	check(len(listed["go"].Partitions) == 3 && listed["go"].Partitions[2].Leader == 1, listed)
	configs, err := admin.DescribeTopicConfigs(ctx, "go")
	must(err)
	found := ""
	for _, config := range configs[0].Configs {
		if config.Key == "retention.ms" {
			found = config.MaybeValue()
		}
	}
	check(found == "9000", configs)
	deleted, err := admin.DeleteTopics(ctx, "go")
	must(err)
	must(deleted.Error())
	meta, err := admin.BrokerMetadata(ctx)
	must(err)
	check(len(meta.Brokers) == 1 && meta.Controller == 1, meta)
	fmt.Println("admin")
}

func roundTrip(ctx context.Context, admin *kadm.Client, name string, codec kgo.CompressionCodec) {
	topic := "codec-" + name
	_, err := admin.CreateTopic(ctx, 3, 1, nil, topic)
	must(err)
	producer := connect(kgo.ProducerBatchCompression(codec), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	defer producer.Close()
	var records []*kgo.Record
	for i := 0; i < 300; i++ {
		text := strconv.Itoa(i)
		records = append(records, &kgo.Record{
			Topic: topic, Partition: int32(i % 3), Key: []byte("key " + text), Value: []byte(text),
			Headers: []kgo.RecordHeader{{Key: "number", Value: []byte(text)}},
		})
	}
	must(producer.ProduceSync(ctx, records...).FirstErr())
	starts := map[int32]kgo.Offset{}
	for p := int32(0); p < 3; p++ {
		starts[p] = kgo.NewOffset().AtStart()
	}
	consumer := connect(kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: starts}))
	defer consumer.Close()
	seen := 0
	for seen < 300 {
		fetches := consumer.PollFetches(ctx)
		must(fetches.Err())
		fetches.EachRecord(func(r *kgo.Record) {
			text := strconv.Itoa(int(3*r.Offset) + int(r.Partition))
			check(string(r.Value) == text && string(r.Key) == "key "+text, r)
			check(string(r.Headers[0].Value) == text, r)
			seen++
		})
	}
}

func offsets(ctx context.Context, admin *kadm.Client) {
	ends, err := admin.ListEndOffsets(ctx, "codec-none")
	must(err)
	end, _ := ends.Lookup("codec-none", 1)
	check(end.Offset == 100, ends)
	deleting := kadm.Offsets{}
	deleting.Add(kadm.Offset{Topic: "codec-none", Partition: 1, At: 40})
	_, err = admin.DeleteRecords(ctx, deleting)
	must(err)
	starts, err := admin.ListStartOffsets(ctx, "codec-none")
	must(err)
	start, _ := starts.Lookup("codec-none", 1)
	check(start.Offset == 40, starts)
	set := kadm.TopicsSet{}
	set.Add("codec-none", 1)
	producers, err := admin.DescribeProducers(ctx, set)
	must(err)
	sorted := producers.SortedProducers()
	check(len(sorted) == 1 && sorted[0].LastSequence == 99, sorted)
	fmt.Println("offsets")
}

func load(ctx context.Context, topic string, count int) {
	client := connect(kgo.ProducerBatchMaxBytes(600), kgo.RetryBackoffFn(func(int) time.Duration {
		return 50 * time.Millisecond
	}))
	defer client.Close()
	failed := make(chan error, count)
	for i := 0; i < count; i++ {
		record := &kgo.Record{Topic: topic, Value: []byte(strconv.Itoa(i))}
		client.Produce(ctx, record, func(_ *kgo.Record, err error) { failed <- err })
		if i%100 == 99 {
			fmt.Println("sent", i+1)
			time.Sleep(20 * time.Millisecond)
		}
	}
	must(client.Flush(ctx))
	for i := 0; i < count; i++ {
		must(<-failed)
	}
	fmt.Println("done")
}
