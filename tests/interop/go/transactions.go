// Transactions of franz-go: `check BOOTSTRAP transactions`, and `check BOOTSTRAP pipe INPUT OUTPUT GROUP COUNT`,
// which copies COUNT records, prints `committed` after each transaction and `done`.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

func transactions(ctx context.Context) {
	client := connect()
	defer client.Close()
	admin := kadm.NewClient(client)
	for _, topic := range []string{"txn-in", "txn-out"} {
		_, err := admin.CreateTopic(ctx, 2, 1, nil, topic)
		must(err)
	}
	endings(ctx)
	sessions(ctx, admin)
	fencing(ctx)
}

func transactional(id string) *kgo.Client {
	return connect(kgo.TransactionalID(id), kgo.RecordPartitioner(kgo.ManualPartitioner()))
}

func one(topic string, partition int32, value string) *kgo.Record {
	return &kgo.Record{Topic: topic, Partition: partition, Value: []byte(value)}
}

// What a reader sees now, up to the end it is told, partition after partition.
func read(ctx context.Context, topic string, isolation kgo.IsolationLevel) []string {
	// A client is told the end that its isolation level sees.
	client := connect(kgo.FetchIsolationLevel(isolation), kgo.ConsumeTopics(topic), kgo.KeepControlRecords())
	defer client.Close()
	list := kadm.NewClient(client).ListEndOffsets
	if isolation == kgo.ReadCommitted() {
		list = kadm.NewClient(client).ListCommittedOffsets
	}
	ends, err := list(ctx, topic)
	must(err)
	positions, seen := map[int32]int64{}, map[int32][]string{}
	behind := func() bool {
		for _, end := range ends[topic] {
			if positions[end.Partition] < end.Offset {
				return true
			}
		}
		return false
	}
	for behind() {
		fetches := client.PollFetches(ctx)
		must(fetches.Err())
		fetches.EachRecord(func(r *kgo.Record) {
			positions[r.Partition] = r.Offset + 1
			if !r.Attrs.IsControl() {
				seen[r.Partition] = append(seen[r.Partition], string(r.Value))
			}
		})
	}
	return append(seen[0], seen[1]...)
}

// Wait until this is what a reader sees: Apache Kafka answers a commit before its markers are written.
func sees(ctx context.Context, topic string, isolation kgo.IsolationLevel, wanted ...string) {
	end := time.Now().Add(10 * time.Second)
	for found := read(ctx, topic, isolation); !slices.Equal(found, wanted); found = read(ctx, topic, isolation) {
		check(time.Now().Before(end), topic, " has ", found, ", not ", wanted)
	}
}

func endings(ctx context.Context) {
	client := transactional("endings")
	defer client.Close()
	var kept []string
	for _, value := range []string{"a", "aborted", "b"} {
		must(client.BeginTransaction())
		must(client.ProduceSync(ctx, one("txn-in", 0, value), one("txn-in", 1, value)).FirstErr())
		sees(ctx, "txn-in", kgo.ReadCommitted(), append(kept, kept...)...)
		commits := value != "aborted"
		must(client.EndTransaction(ctx, kgo.TransactionEndTry(commits)))
		if commits {
			kept = append(kept, value)
		}
	}
	sees(ctx, "txn-in", kgo.ReadCommitted(), "a", "b", "a", "b")
	sees(ctx, "txn-in", kgo.ReadUncommitted(), "a", "aborted", "b", "a", "aborted", "b")
	fmt.Println("endings")
}

func session(group string, topic string) *kgo.GroupTransactSession {
	session, err := kgo.NewGroupTransactSession(
		kgo.SeedBrokers(os.Args[1]), kgo.TransactionalID(group), kgo.ConsumerGroup(group), kgo.ConsumeTopics(topic),
		// A program that is started again takes the place of the one that was killed, at once.
		kgo.InstanceID(group), kgo.Balancers(kgo.RangeBalancer()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.RequireStableFetchOffsets(),
		kgo.RetryBackoffFn(func(int) time.Duration { return 20 * time.Millisecond }),
		kgo.FetchMaxWait(100*time.Millisecond), kgo.MetadataMinAge(50*time.Millisecond),
	)
	must(err)
	return session
}

// An aborted transaction's records are read and copied once more; those of a committed one are not.
func sessions(ctx context.Context, admin *kadm.Client) {
	session := session("session", "txn-in")
	defer session.Close()
	for _, end := range []kgo.TransactionEndTry{kgo.TryAbort, kgo.TryCommit} {
		must(session.Begin())
		for copied := 0; copied < 4; {
			fetches := session.PollFetches(ctx)
			var joining *kgo.ErrGroupSession // of an Apache Kafka that has only started; franz-go tries again
			if err := fetches.Err(); !errors.As(err, &joining) {
				must(err)
			}
			fetches.EachRecord(func(r *kgo.Record) {
				must(session.ProduceSync(ctx, one("txn-out", r.Partition, string(r.Value))).FirstErr())
				copied++
			})
		}
		sees(ctx, "txn-out", kgo.ReadCommitted())
		committed, err := session.End(ctx, end)
		must(err)
		check(committed == bool(end), "ended the other way")
		for limit := time.Now().Add(10 * time.Second); committed && offsetOf(ctx, admin, "session") == 0; {
			check(time.Now().Before(limit), "no offsets") // which Apache Kafka, too, writes after its answer
		}
		check(committed || offsetOf(ctx, admin, "session") == 0, "offsets of an aborted transaction")
	}
	sees(ctx, "txn-out", kgo.ReadCommitted(), "a", "b", "a", "b")
	fmt.Println("sessions")
}

// A second client of the same id: what the first has open is aborted, and it can end nothing any more.
func fencing(ctx context.Context) {
	first, second := transactional("fencing"), transactional("fencing")
	defer first.Close()
	defer second.Close()
	must(first.BeginTransaction())
	must(first.ProduceSync(ctx, one("txn-out", 0, "left open")).FirstErr())
	must(second.BeginTransaction())
	must(second.ProduceSync(ctx, one("txn-out", 1, "of the second")).FirstErr())
	must(second.EndTransaction(ctx, kgo.TryCommit))
	err := first.EndTransaction(ctx, kgo.TryCommit)
	fenced := errors.Is(err, kerr.ProducerFenced) || errors.Is(err, kerr.InvalidProducerEpoch)
	check(fenced, "the first was not fenced: ", err)
	sees(ctx, "txn-out", kgo.ReadCommitted(), "a", "b", "a", "b", "of the second")
	fmt.Println("fencing")
}

// The sum of a group's offsets.
func offsetOf(ctx context.Context, admin *kadm.Client, group string) (sum int64) {
	fetched, err := admin.FetchOffsets(ctx, group)
	must(err)
	must(fetched.Error())
	fetched.Each(func(found kadm.OffsetResponse) { sum += max(found.At, 0) })
	return sum
}

func pipe(ctx context.Context, input, output, group string, count int64) {
	session := session(group, input)
	defer session.Close()
	admin := kadm.NewClient(session.Client())
	// Not with the first record: nothing is read before the transaction that a killed program left is aborted.
	_, _, err := session.Client().ProducerID(ctx)
	must(err)
	for offsetOf(ctx, admin, group) < count {
		short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		fetches := session.PollRecords(short, 50)
		cancel()
		if fetches.NumRecords() == 0 {
			continue
		}
		must(session.Begin())
		fetches.EachRecord(func(r *kgo.Record) {
			session.Produce(ctx, one(output, r.Partition, string(r.Value)), nil)
		})
		committed, err := session.End(ctx, kgo.TryCommit)
		must(err)
		if committed {
			fmt.Println("committed")
		}
	}
	fmt.Println("done")
}
