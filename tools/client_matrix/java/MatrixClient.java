// The Java client (kafka-clients) for the matrix of clients. The commands are listed in program.py of
// oncelog_devtools.client_matrix.

import java.io.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.*;
import org.apache.kafka.common.utils.AppInfoParser;

public class MatrixClient {
    static String servers;
    static KafkaProducer<String, String> producer;
    static KafkaConsumer<String, String> consumer;
    static final Map<String, String> results = Collections.synchronizedMap(new LinkedHashMap<>());

    public static void main(String[] args) throws Exception {
        servers = args[0];
        var input = new BufferedReader(new InputStreamReader(System.in));
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            String reply;
            try {
                reply = run(line.split(" "));
            } catch (Exception error) {
                reply = "error\t" + plain(error);
            }
            System.out.println(reply);
        }
        System.exit(0);  // an open transaction stays open, as after a crash
    }

    static String plain(Throwable error) {
        String text = error.getClass().getSimpleName() + ": " + error.getMessage();
        return text.substring(0, Math.min(text.length(), 200)).replaceAll("\\s+", " ");
    }

    static String run(String[] words) throws Exception {
        switch (words[0]) {
            case "version": return "ok\t" + AppInfoParser.getVersion();
            case "producer": start(words[1], words.length > 2 ? words[2] : ""); return "ok";
            case "send": for (int i = 3; i < words.length; i++) send(words[1], Integer.parseInt(words[2]), words[i]); return "ok";
            case "flush": return flush(Long.parseLong(words[1]));
            case "begin": producer.beginTransaction(); return "ok";
            case "commit": producer.commitTransaction(); return "ok";
            case "abort": producer.abortTransaction(); return "ok";
            case "offsets":
                var offset = new OffsetAndMetadata(Long.parseLong(words[2]));
                producer.sendOffsetsToTransaction(Map.of(new TopicPartition(words[1], 0), offset), consumer.groupMetadata());
                return "ok";
            case "consume": return consume(words);
            case "close": consumer.close(); return "ok";
            default: throw new IllegalArgumentException("no command " + words[0]);
        }
    }

    static void start(String kind, String argument) {
        Map<String, Object> settings = new HashMap<>(Map.of("bootstrap.servers", servers));
        if (!kind.equals("default")) settings.putAll(Map.of("batch.size", 0, "linger.ms", 0));
        if (kind.equals("give-up"))
            settings.putAll(Map.of("request.timeout.ms", 1000, "delivery.timeout.ms", Integer.parseInt(argument)));
        if (kind.equals("transactional")) settings.put("transactional.id", argument);
        producer = new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer());
        if (kind.equals("transactional")) producer.initTransactions();
    }

    static void send(String topic, int partition, String value) {
        results.put(value, "pending");
        try {
            producer.send(new ProducerRecord<>(topic, partition, null, value), (metadata, error) ->
                results.put(value, error == null ? "ok" : plain(error)));
        } catch (Exception error) {
            results.put(value, plain(error));
        }
    }

    static String flush(long seconds) throws Exception {
        long end = System.nanoTime() + seconds * 1_000_000_000L;
        while (results.containsValue("pending") && System.nanoTime() < end) Thread.sleep(10);
        StringBuilder reply = new StringBuilder("results");
        synchronized (results) {
            results.forEach((value, result) -> reply.append("\t").append(value).append("=").append(result));
            results.values().removeIf(result -> !result.equals("pending"));
        }
        return reply.toString();
    }

    static String consume(String[] words) {
        Map<String, Object> settings = new HashMap<>(Map.of("bootstrap.servers", servers, "group.id", words[2]));
        settings.putAll(Map.of("group.protocol", words[5], "auto.offset.reset", "earliest", "enable.auto.commit", false));
        if (!words[4].equals("default")) settings.put("isolation.level", words[4]);
        if (!words[6].equals("-")) settings.put("group.instance.id", words[6]);
        consumer = new KafkaConsumer<>(settings, new StringDeserializer(), new StringDeserializer());
        consumer.subscribe(List.of(words[1]));
        StringBuilder reply = new StringBuilder("records");
        long end = System.nanoTime() + 100_000_000_000L;
        for (int count = 0; count < Integer.parseInt(words[3]) && System.nanoTime() < end; )
            for (var record : consumer.poll(Duration.ofMillis(200))) {
                reply.append("\t").append(record.value());
                count++;
            }
        return reply.toString();
    }
}
