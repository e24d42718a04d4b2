// A Kafka Streams application with processing.guarantee=exactly_once_v2: `Streams BOOTSTRAP INSTANCE DIRECTORY`.
// From the topic `numbers`: every record to `passed`; how many there are by the number's last digit, counted in a
// state store behind a repartition topic, to `counts`. Prints its states; ends with its standard input.

import java.util.*;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.*;
import org.apache.kafka.streams.kstream.*;

public class Streams {
    public static void main(String[] args) throws Exception {
        Properties settings = new Properties();
        settings.put(StreamsConfig.APPLICATION_ID_CONFIG, "digits");
        settings.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, args[0]);
        settings.put(StreamsConfig.STATE_DIR_CONFIG, args[2]);
        settings.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2);
        settings.put(StreamsConfig.DEFAULT_KEY_SERDE_CLASS_CONFIG, Serdes.StringSerde.class);
        settings.put(StreamsConfig.DEFAULT_VALUE_SERDE_CLASS_CONFIG, Serdes.StringSerde.class);
        settings.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, 2);
        // One that is started again takes the place of the one that was killed, at once.
        settings.put(ConsumerConfig.GROUP_INSTANCE_ID_CONFIG, args[1]);
        settings.put(ConsumerConfig.SESSION_TIMEOUT_MS_CONFIG, 1500);
        settings.put(ConsumerConfig.HEARTBEAT_INTERVAL_MS_CONFIG, 300);
        settings.put(StreamsConfig.consumerPrefix(ConsumerConfig.AUTO_OFFSET_RESET_CONFIG), "earliest");

        StreamsBuilder builder = new StreamsBuilder();
        KStream<String, String> numbers = builder.stream("numbers");
        numbers.to("passed");
        numbers.groupBy((key, number) -> number.substring(number.length() - 1))
            .count(Materialized.as("store"))
            .toStream()
            .mapValues(count -> Long.toString(count))
            .to("counts");

        KafkaStreams streams = new KafkaStreams(builder.build(), settings);
        streams.setStateListener((now, before) -> System.out.println(now));
        streams.start();
        System.in.read();
        streams.close();
    }
}
