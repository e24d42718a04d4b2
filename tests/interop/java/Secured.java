// The Java client with locked doors: `Secured ADMIN.properties ALICE.properties`.
// Prints a line for each thing that was found to work; anything else ends it with an exception.

import java.io.FileReader;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.ExecutionException;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.acl.*;
import org.apache.kafka.common.errors.*;
import org.apache.kafka.common.resource.*;
import org.apache.kafka.common.serialization.*;

public class Secured {
    static Properties alice, admin;

    public static void main(String[] args) throws Exception {
        admin = read(args[0]);
        alice = read(args[1]);
        try (Admin client = Admin.create(admin)) {
            client.createTopics(List.of(new NewTopic("secured", 1, (short) 1))).all().get();
            denied();
            acls(client);
            users(client);
        }
        transaction();
        group();
        expiry();
    }

    static Properties read(String file) throws Exception {
        Properties found = new Properties();
        try (FileReader reader = new FileReader(file)) {
            found.load(reader);
        }
        return found;
    }

    static void check(boolean holds, Object what) {
        if (!holds) throw new AssertionError(what);
    }

    static KafkaProducer<byte[], byte[]> producer(Map<String, Object> more) {
        Map<String, Object> settings = new HashMap<>();
        for (String key : alice.stringPropertyNames()) settings.put(key, alice.getProperty(key));
        settings.putAll(more);
        return new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer());
    }

    static ProducerRecord<byte[], byte[]> record(int number) {
        return new ProducerRecord<>("secured", new byte[] {(byte) number});
    }

    static void denied() throws Exception {
        try (KafkaProducer<byte[], byte[]> producer = producer(Map.of())) {
            producer.send(record(0)).get();
            throw new AssertionError("stored without leave");
        } catch (ExecutionException error) {
            check(error.getCause() instanceof AuthorizationException, error.getCause());
        }
        System.out.println("denied");
    }

    static void acls(Admin client) throws Exception {
        List<AclBinding> wanted = new ArrayList<>();
        for (ResourceType type : List.of(ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID)) {
            wanted.add(new AclBinding(
                new ResourcePattern(type, "secured", PatternType.PREFIXED),
                new AccessControlEntry("User:alice", "*", AclOperation.ALL, AclPermissionType.ALLOW)));
        }
        client.createAcls(wanted).all().get();
        check(Set.copyOf(client.describeAcls(AclBindingFilter.ANY).values().get()).equals(Set.copyOf(wanted)), "acls");
        AclBinding other = new AclBinding(
            new ResourcePattern(ResourceType.TOPIC, "*", PatternType.LITERAL),
            new AccessControlEntry("User:bob", "127.0.0.1", AclOperation.READ, AclPermissionType.DENY));
        client.createAcls(List.of(other)).all().get();
        Collection<AclBinding> gone = client.deleteAcls(List.of(other.toFilter())).all().get();
        check(List.copyOf(gone).equals(List.of(other)), gone);
        System.out.println("acls");
    }

    static void users(Admin client) throws Exception {
        ScramCredentialInfo strong = new ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 5000);
        client.alterUserScramCredentials(List.of(new UserScramCredentialUpsertion("carol", strong, "c"))).all().get();
        UserScramCredentialsDescription carol =
            client.describeUserScramCredentials(List.of("carol")).all().get().get("carol");
        check(carol.credentialInfos().equals(List.of(strong)), carol);
        client.alterUserScramCredentials(
            List.of(new UserScramCredentialDeletion("carol", ScramMechanism.SCRAM_SHA_512))).all().get();
        System.out.println("users");
    }

    static void transaction() throws Exception {
        try (KafkaProducer<byte[], byte[]> producer = producer(Map.of("transactional.id", "secured-1"))) {
            producer.initTransactions();
            producer.beginTransaction();
            for (int number = 0; number < 10; number++) producer.send(record(number));
            producer.commitTransaction();
        }
        try (KafkaProducer<byte[], byte[]> producer = producer(Map.of("transactional.id", "other"))) {
            producer.initTransactions();
            throw new AssertionError("a transactional id without leave");
        } catch (TransactionalIdAuthorizationException expected) {
            System.out.println("transaction");
        }
    }

    static void group() {
        Map<String, Object> settings = new HashMap<>();
        for (String key : alice.stringPropertyNames()) settings.put(key, alice.getProperty(key));
        settings.putAll(Map.of(
            "group.id", "secured-group", "auto.offset.reset", "earliest", "isolation.level", "read_committed"));
        int count = 0;
        try (KafkaConsumer<byte[], byte[]> consumer =
                 new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
            consumer.subscribe(List.of("secured"));
            long end = System.currentTimeMillis() + 60_000;
            while (count < 10 && System.currentTimeMillis() < end) count += consumer.poll(Duration.ofMillis(200)).count();
            consumer.commitSync();
        }
        check(count == 10, count);
        System.out.println("group");
    }

    /** Longer than a session lasts: the client authenticates again on its connection. */
    static void expiry() throws Exception {
        try (KafkaProducer<byte[], byte[]> producer = producer(Map.of("enable.idempotence", true))) {
            long end = System.currentTimeMillis() + 3_000, offset = -1;
            while (System.currentTimeMillis() < end) {
                long next = producer.send(record(1)).get().offset();
                check(next > offset, next);
                offset = next;
                Thread.sleep(50);
            }
        }
        System.out.println("expiry");
    }
}
