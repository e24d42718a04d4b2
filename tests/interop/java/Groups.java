// The Java client's consumers of KIP-848 in a group: `Groups.java BOOTSTRAP TOPIC PARTITIONS`, an even number.
// Prints a line for each thing that was found to work; anything else ends it with an exception.

import java.time.Duration;
import java.util.*;
import java.util.function.BooleanSupplier;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.common.GroupState;
import org.apache.kafka.common.serialization.*;

public class Groups {
    static KafkaConsumer<byte[], byte[]> consumer(String bootstrap, String instance) {
        Map<String, Object> settings = new HashMap<>(Map.of(
            "bootstrap.servers", bootstrap, "group.id", "java-group", "group.protocol", "consumer",
            "auto.offset.reset", "earliest", "enable.auto.commit", false));
        if (instance != null) settings.put("group.instance.id", instance);
        return new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    static int seen = 0;

    static void until(BooleanSupplier holds, List<KafkaConsumer<byte[], byte[]>> members) {
        long deadline = System.nanoTime() + 30_000_000_000L;
        while (!holds.getAsBoolean()) {
            if (System.nanoTime() > deadline) throw new AssertionError("time is over");
            for (KafkaConsumer<byte[], byte[]> each : members) seen += each.poll(Duration.ofMillis(50)).count();
        }
    }

    public static void main(String[] args) throws Exception {
        String topic = args[1];
        int count = Integer.parseInt(args[2]);
        KafkaConsumer<byte[], byte[]> first = consumer(args[0], null), second = consumer(args[0], "static");
        first.subscribe(List.of(topic));
        until(() -> first.assignment().size() == count && seen == 40, List.of(first));
        first.commitSync();
        System.out.println("one reads all and commits");
        second.subscribe(new SubscriptionPattern(topic + ".*"));
        until(() -> first.assignment().size() == count / 2 && second.assignment().size() == count / 2,
            List.of(first, second));
        second.commitSync();
        System.out.println("two share");
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", args[0]))) {
            ConsumerGroupDescription told =
                admin.describeConsumerGroups(List.of("java-group")).all().get().get("java-group");
            if (told.groupState() != GroupState.STABLE || told.members().size() != 2) throw new AssertionError(told);
            System.out.println("described as " + told.type());
        }
        first.close();
        until(() -> second.assignment().size() == count, List.of(second));
        second.close();
        System.out.println("the other takes over");
    }
}
