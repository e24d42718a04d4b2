// Transactions of the Java client: `Transactions BOOTSTRAP everything`, which prints a line for each thing that was
// found to work, or `Transactions BOOTSTRAP pipe INPUT OUTPUT GROUP COUNT`, which copies COUNT records from one topic
// to another, prints `committed` after each transaction and `done`. What fails ends it with an exception.

import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.stream.*;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.*;
import org.apache.kafka.common.serialization.*;

public class Transactions {
    static String bootstrap;
    static final String run = UUID.randomUUID().toString().substring(0, 8);

    public static void main(String[] args) throws Exception {
        bootstrap = args[0];
        if (args[1].equals("pipe")) {
            pipe(args[2], args[3], args[4], Integer.parseInt(args[5]));
            return;
        }
        endings();
        group();
        offsets();
        zombieMember();
        fencing();
    }

    static void check(boolean holds, Object what) {
        if (!holds) throw new AssertionError(what);
    }

    interface Block {
        void run() throws Exception;
    }

    static <E extends Exception> void refused(Class<E> expected, Block block) throws Exception {
        try {
            block.run();
        } catch (Exception error) {
            check(expected.isInstance(error), error);
            return;
        }
        throw new AssertionError("no " + expected);
    }

    static String topic(String name, int partitions) throws Exception {
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", bootstrap))) {
            String full = name + "-" + run;
            admin.createTopics(List.of(new NewTopic(full, partitions, (short) 1))).all().get();
            return full;
        }
    }

    static KafkaProducer<String, String> producer(String id) {
        Map<String, Object> settings = new HashMap<>(Map.of("bootstrap.servers", bootstrap, "transactional.id", id));
        settings.putAll(Map.of("retry.backoff.ms", 20, "reconnect.backoff.max.ms", 100));
        var producer = new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer());
        producer.initTransactions();
        return producer;
    }

    static KafkaConsumer<String, String> consumer(String group, String isolation) {
        Map<String, Object> settings = new HashMap<>(Map.of("bootstrap.servers", bootstrap, "group.id", group));
        settings.putAll(Map.of("isolation.level", isolation, "enable.auto.commit", false));
        settings.putAll(Map.of("auto.offset.reset", "earliest", "max.poll.records", 50));
        settings.putAll(Map.of("reconnect.backoff.max.ms", 100, "fetch.max.wait.ms", 100));
        return new KafkaConsumer<>(settings, new StringDeserializer(), new StringDeserializer());
    }

    /** Everything that a reader sees now, up to the end it is told, partition after partition. */
    static List<String> read(String topic, int partitions, String isolation) {
        List<TopicPartition> all =
            IntStream.range(0, partitions).mapToObj(i -> new TopicPartition(topic, i)).collect(Collectors.toList());
        Map<TopicPartition, List<String>> seen = new HashMap<>();
        try (var consumer = consumer("reader-" + run, isolation)) {
            consumer.assign(all);
            consumer.seekToBeginning(all);
            var ends = consumer.endOffsets(all);
            while (all.stream().anyMatch(at -> consumer.position(at) < ends.get(at)))
                for (var record : consumer.poll(Duration.ofMillis(100)))
                    seen.computeIfAbsent(new TopicPartition(topic, record.partition()), at -> new ArrayList<>())
                        .add(record.value());
        }
        return all.stream().flatMap(at -> seen.getOrDefault(at, List.of()).stream()).collect(Collectors.toList());
    }

    static void sendTo(KafkaProducer<String, String> producer, String topic, int partitions, String value)
        throws Exception {
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        for (int i = 0; i < partitions; i++) sent.add(producer.send(new ProducerRecord<>(topic, i, "key", value)));
        producer.flush();
        for (var each : sent) each.get();
    }

    /** Wait until this is what a read_committed reader sees: Apache Kafka answers a commit before its markers. */
    static void comes(String topic, int partitions, List<String> wanted) throws Exception {
        long end = System.nanoTime() + 10_000_000_000L;
        List<String> seen;
        while (!(seen = read(topic, partitions, "read_committed")).equals(wanted))
            check(System.nanoTime() < end, topic + " has " + seen + ", not " + wanted);
    }

    static void endings() throws Exception {
        String one = topic("one", 3), other = topic("other", 1);
        List<String> kept = new ArrayList<>();
        try (var producer = producer("endings-" + run)) {
            for (String value : List.of("a", "aborted", "b")) {
                producer.beginTransaction();
                sendTo(producer, one, 3, value);
                sendTo(producer, other, 1, value);
                comes(other, 1, kept);
                check(!read(one, 3, "read_committed").contains(value), "visible before its end");
                if (value.equals("aborted")) {
                    producer.abortTransaction();
                } else {
                    producer.commitTransaction();
                    kept.add(value);
                }
            }
            producer.beginTransaction();
            producer.commitTransaction(); // of nothing
        }
        comes(other, 1, List.of("a", "b"));
        comes(one, 3, List.of("a", "b", "a", "b", "a", "b"));
        check(read(other, 1, "read_uncommitted").equals(List.of("a", "aborted", "b")), "uncommitted");
        System.out.println("endings");
    }

    /** A subscribed read_committed reader while transactions are open, aborted and committed. */
    static void group() throws Exception {
        String topic = topic("grouped", 2);
        List<String> seen = new ArrayList<>();
        try (var producer = producer("grouped-" + run); var consumer = consumer("grouped-" + run, "read_committed")) {
            consumer.subscribe(List.of(topic));
            for (int i = 0; i < 10; i++) {
                producer.beginTransaction();
                sendTo(producer, topic, 2, Integer.toString(i));
                consumer.poll(Duration.ofMillis(100)).forEach(record -> seen.add(record.value()));
                check(!seen.contains(Integer.toString(i)), "seen while open");
                if (i % 3 == 0) producer.abortTransaction();
                else producer.commitTransaction();
            }
            while (seen.size() < 12)
                consumer.poll(Duration.ofMillis(100)).forEach(record -> seen.add(record.value()));
        }
        List<String> wanted = List.of("1", "1", "2", "2", "4", "4", "5", "5", "7", "7", "8", "8");
        check(seen.stream().sorted().collect(Collectors.toList()).equals(wanted), seen);
        System.out.println("group");
    }

    static void offsets() throws Exception {
        String topic = topic("offsets", 1);
        TopicPartition at = new TopicPartition(topic, 0);
        try (var producer = producer("offsets-" + run); var consumer = consumer("offsets-" + run, "read_committed")) {
            producer.beginTransaction();
            sendTo(producer, topic, 1, "in");
            producer.commitTransaction();
            consumer.subscribe(List.of(topic));
            while (consumer.poll(Duration.ofMillis(100)).isEmpty()) {}
            for (boolean commits : List.of(false, true)) {
                producer.beginTransaction();
                sendTo(producer, topic, 1, commits ? "kept" : "dropped");
                var position = Map.of(at, new OffsetAndMetadata(1, "note"));
                producer.sendOffsetsToTransaction(position, consumer.groupMetadata());
                if (commits) producer.commitTransaction();
                else producer.abortTransaction();
                var committed = consumer.committed(Set.of(at)).get(at);
                check(commits ? committed.equals(position.get(at)) : committed == null, committed);
            }
        }
        comes(topic, 1, List.of("in", "kept"));
        System.out.println("offsets");
    }

    /** A member that left its group cannot commit by a transaction; records and offsets are dropped together. */
    static void zombieMember() throws Exception {
        String topic = topic("zombie", 1);
        var position = Map.of(new TopicPartition(topic, 0), new OffsetAndMetadata(7));
        try (var producer = producer("zombie-" + run); var living = consumer("zombie-" + run, "read_committed")) {
            ConsumerGroupMetadata stale;
            try (var gone = consumer("zombie-" + run, "read_committed")) {
                gone.subscribe(List.of(topic));
                while (gone.assignment().isEmpty()) gone.poll(Duration.ofMillis(100));
                stale = gone.groupMetadata();
            }
            living.subscribe(List.of(topic));
            while (living.assignment().isEmpty()) living.poll(Duration.ofMillis(100));
            producer.beginTransaction();
            sendTo(producer, topic, 1, "of a zombie");
            refused(CommitFailedException.class, () -> producer.sendOffsetsToTransaction(position, stale));
            producer.abortTransaction();
            check(living.committed(position.keySet()).get(new TopicPartition(topic, 0)) == null, "zombie's offset");
            producer.beginTransaction();
            producer.sendOffsetsToTransaction(position, living.groupMetadata());
            producer.commitTransaction();
            check(living.committed(position.keySet()).equals(position), "offset");
        }
        comes(topic, 1, List.of());
        System.out.println("zombie member");
    }

    static void fencing() throws Exception {
        String topic = topic("fencing", 1);
        var first = producer("fencing-" + run);
        first.beginTransaction();
        sendTo(first, topic, 1, "left open");
        try (var second = producer("fencing-" + run)) {
            refused(ProducerFencedException.class, first::commitTransaction);
            refused(ProducerFencedException.class, first::beginTransaction);
            second.beginTransaction();
            sendTo(second, topic, 1, "of the second");
            second.commitTransaction();
        }
        first.close(Duration.ZERO);
        comes(topic, 1, List.of("of the second"));
        System.out.println("fencing");
    }

    static void pipe(String input, String output, String group, int count) {
        try (var producer = producer(group); var consumer = consumer(group, "read_committed")) {
            Set<TopicPartition> all = consumer.partitionsFor(input).stream()
                .map(info -> new TopicPartition(input, info.partition())).collect(Collectors.toSet());
            consumer.subscribe(List.of(input));
            while (done(consumer, all) < count) {
                var records = consumer.poll(Duration.ofMillis(100));
                if (records.isEmpty()) continue;
                producer.beginTransaction();
                try {
                    for (var record : records)
                        producer.send(new ProducerRecord<>(output, record.partition(), null, record.value()));
                    producer.sendOffsetsToTransaction(records.nextOffsets(), consumer.groupMetadata());
                    producer.commitTransaction();
                    System.out.println("committed");
                } catch (ProducerFencedException fatal) {
                    throw fatal;
                } catch (KafkaException abortable) {
                    System.err.println("aborted after " + abortable);
                    producer.abortTransaction();
                    consumer.committed(all).forEach((at, offset) ->
                        consumer.seek(at, offset == null ? 0 : offset.offset()));
                }
            }
        }
        System.out.println("done");
    }

    static long done(KafkaConsumer<String, String> consumer, Set<TopicPartition> all) {
        return consumer.committed(all).values().stream().mapToLong(at -> at == null ? 0 : at.offset()).sum();
    }
}
