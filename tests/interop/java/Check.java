// The Java client against a broker: `Check BOOTSTRAP everything` or `Check BOOTSTRAP load TOPIC COUNT`.
// Prints a line for each thing that was found to work; anything else ends it with an exception.

import java.util.*;
import java.util.concurrent.*;
import java.util.stream.*;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.errors.*;
import org.apache.kafka.common.serialization.*;

public class Check {
    static String bootstrap;

    public static void main(String[] args) throws Exception {
        bootstrap = args[0];
        if (args[1].equals("load")) {
            load(args[2], Integer.parseInt(args[3]));
            return;
        }
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", bootstrap))) {
            topics(admin);
            for (String codec : List.of("none", "gzip", "snappy", "lz4", "zstd")) roundTrip(admin, codec);
            acks(admin);
            reading(admin);
            records(admin);
            cluster(admin);
        }
    }

    static void check(boolean holds, Object what) {
        if (!holds) throw new AssertionError(what);
    }

    static KafkaProducer<byte[], byte[]> producer(Map<String, Object> more) {
        Map<String, Object> settings = new HashMap<>(Map.of("bootstrap.servers", bootstrap));
        settings.putAll(more);
        return new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer());
    }

    static KafkaConsumer<byte[], byte[]> consumer(Map<String, Object> more) {
        Map<String, Object> settings = new HashMap<>(Map.of("bootstrap.servers", bootstrap));
        settings.putAll(more);
        return new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    static void topics(Admin admin) throws Exception {
        NewTopic wanted = new NewTopic("java", 2, (short) 1).configs(Map.of("retention.ms", "9000"));
        CreateTopicsResult created = admin.createTopics(List.of(wanted));
        check(created.numPartitions("java").get() == 2, "partitions of the answer");
        check(created.config("java").get().get("retention.ms").value().equals("9000"), "configs of the answer");
        try {
            admin.createTopics(List.of(wanted)).all().get();
            throw new AssertionError("created twice");
        } catch (ExecutionException error) {
            check(error.getCause() instanceof TopicExistsException, error.getCause());
        }
        admin.createPartitions(Map.of("java", NewPartitions.increaseTo(3))).all().get();
        TopicDescription described = admin.describeTopics(List.of("java")).allTopicNames().get().get("java");
        check(described.partitions().size() == 3 && described.partitions().get(2).leader().id() == 1, described);
        check(admin.listTopics().names().get().contains("java"), "list");
        ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, "java");
        AlterConfigOp op = new AlterConfigOp(new ConfigEntry("segment.bytes", "2000000"), AlterConfigOp.OpType.SET);
        admin.incrementalAlterConfigs(Map.of(resource, List.of(op))).all().get();
        Config config = admin.describeConfigs(List.of(resource)).all().get().get(resource);
        check(config.get("segment.bytes").value().equals("2000000"), config);
        check(config.get("segment.bytes").source() == ConfigEntry.ConfigSource.DYNAMIC_TOPIC_CONFIG, config);
        admin.createTopics(List.of(new NewTopic("doomed", 1, (short) 1))).all().get();
        admin.deleteTopics(List.of("doomed")).all().get();
        check(!admin.listTopics().names().get().contains("doomed"), "deleted");
        System.out.println("topics");
    }

    static void roundTrip(Admin admin, String codec) throws Exception {
        String topic = "codec-" + codec;
        admin.createTopics(List.of(new NewTopic(topic, 3, (short) 1))).all().get();
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        ConcurrentLinkedQueue<Long> called = new ConcurrentLinkedQueue<>();
        try (var producer = producer(Map.of("compression.type", codec, "linger.ms", 5))) {
            for (int i = 0; i < 300; i++) {
                byte[] value = i % 7 == 0 ? null : ("value " + i).getBytes();
                var record = new ProducerRecord<>(topic, i % 3, (long) 1000 + i, ("key " + i).getBytes(), value);
                record.headers().add("number", Integer.toString(i).getBytes()).add("none", (byte[]) null);
                sent.add(producer.send(record, (metadata, error) -> called.add(metadata.offset())));
            }
        }
        for (int i = 0; i < 300; i++) check(sent.get(i).get().offset() == i / 3, "offset of " + i);
        check(called.size() == 300, called.size());
        int[] seen = new int[3];
        for (var record : readAll(topic, 3, 300, "read_uncommitted")) {
            int i = 3 * seen[record.partition()]++ + record.partition();
            check(new String(record.key()).equals("key " + i) && record.timestamp() == 1000 + i, record);
            check(i % 7 == 0 ? record.value() == null : new String(record.value()).equals("value " + i), record);
            check(new String(record.headers().lastHeader("number").value()).equals("" + i), record);
            check(record.headers().lastHeader("none").value() == null, record);
        }
        System.out.println("codec " + codec);
    }

    static List<ConsumerRecord<byte[], byte[]>> readAll(String topic, int partitions, int count, String isolation) {
        List<ConsumerRecord<byte[], byte[]>> found = new ArrayList<>();
        try (var consumer = consumer(Map.of("isolation.level", isolation))) {
            List<TopicPartition> parts =
                IntStream.range(0, partitions).mapToObj(i -> new TopicPartition(topic, i)).collect(Collectors.toList());
            consumer.assign(parts);
            consumer.seekToBeginning(parts);
            long end = System.nanoTime() + 30_000_000_000L;
            while (found.size() < count && System.nanoTime() < end)
                consumer.poll(java.time.Duration.ofMillis(200)).forEach(found::add);
        }
        check(found.size() == count, found.size());
        return found;
    }

    static void acks(Admin admin) throws Exception {
        admin.createTopics(List.of(new NewTopic("acks", 1, (short) 1))).all().get();
        for (String acks : List.of("0", "1", "all"))
            try (var producer = producer(Map.of("acks", acks, "enable.idempotence", "false"))) {
                for (int i = 0; i < 10; i++) producer.send(new ProducerRecord<>("acks", acks.getBytes()));
            }
        check(readAll("acks", 1, 30, "read_committed").size() == 30, "acks");
        System.out.println("acks");
    }

    static void reading(Admin admin) throws Exception {
        TopicPartition at = new TopicPartition("codec-none", 1);
        try (var consumer = consumer(Map.of("isolation.level", "read_committed", "max.poll.records", 10))) {
            consumer.assign(List.of(at));
            check(consumer.beginningOffsets(List.of(at)).get(at) == 0, "beginning");
            check(consumer.endOffsets(List.of(at)).get(at) == 100, "end");
            check(consumer.offsetsForTimes(Map.of(at, 1151L)).get(at).offset() == 50, "times");
            consumer.seek(at, 90);
            var records = consumer.poll(java.time.Duration.ofSeconds(10)).records(at);
            check(records.get(0).offset() == 90 && records.size() == 10, records.size());
            check(consumer.position(at) == 100, consumer.position(at));
            check(consumer.partitionsFor("codec-none").size() == 3, "partitionsFor");
        }
        byte[] large = new byte[900_000];
        Arrays.fill(large, (byte) 7);
        try (var producer = producer(Map.of())) {
            producer.send(new ProducerRecord<>("acks", 0, null, large)).get();
            try {
                producer.send(new ProducerRecord<>("acks", 0, null, new byte[2_000_000])).get();
                throw new AssertionError("too large a record was taken");
            } catch (ExecutionException error) {
                check(error.getCause() instanceof RecordTooLargeException, error.getCause());
            }
        }
        var all = readAll("acks", 1, 31, "read_uncommitted");
        check(Arrays.equals(all.get(30).value(), large), "large");
        System.out.println("reading");
    }

    static void records(Admin admin) throws Exception {
        TopicPartition at = new TopicPartition("codec-none", 0);
        var latest = Map.of(at, OffsetSpec.latest());
        check(admin.listOffsets(latest).all().get().get(at).offset() == 100, "latest");
        check(admin.listOffsets(Map.of(at, OffsetSpec.earliest())).all().get().get(at).offset() == 0, "earliest");
        var newest = admin.listOffsets(Map.of(at, OffsetSpec.maxTimestamp())).all().get().get(at);
        check(newest.offset() == 99 && newest.timestamp() == 1297, newest);
        check(admin.listOffsets(Map.of(at, OffsetSpec.forTimestamp(1150))).all().get().get(at).offset() == 50, "time");
        var deleted = admin.deleteRecords(Map.of(at, RecordsToDelete.beforeOffset(40)));
        check(deleted.lowWatermarks().get(at).get().lowWatermark() == 40, "low watermark");
        check(admin.listOffsets(Map.of(at, OffsetSpec.earliest())).all().get().get(at).offset() == 40, "start");
        System.out.println("records");
    }

    static void cluster(Admin admin) throws Exception {
        var cluster = admin.describeCluster();
        check(cluster.nodes().get().size() == 1 && cluster.controller().get().id() == 1, cluster);
        check(cluster.clusterId().get().length() == 22, cluster.clusterId().get());
        var dirs = admin.describeLogDirs(List.of(1)).allDescriptions().get().get(1);
        var replicas = dirs.values().iterator().next().replicaInfos();
        check(replicas.get(new TopicPartition("codec-none", 1)).size() > 0, replicas);
        TopicPartition at = new TopicPartition("codec-none", 1);
        var states = admin.describeProducers(List.of(at)).all().get().get(at).activeProducers();
        check(states.size() == 1 && states.get(0).lastSequence() == 99, states);
        System.out.println("cluster");
    }

    static void load(String topic, int count) throws Exception {
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        try (var producer = producer(Map.of("batch.size", 500, "reconnect.backoff.max.ms", 100))) {
            for (int i = 0; i < count; i++) {
                sent.add(producer.send(new ProducerRecord<>(topic, Integer.toString(i).getBytes())));
                if (i % 100 == 99) {
                    System.out.println("sent " + (i + 1));
                    Thread.sleep(20);
                }
            }
        }
        for (Future<RecordMetadata> each : sent) each.get();
        System.out.println("done");
    }
}
