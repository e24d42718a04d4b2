// KafkaJS against a broker: `node check.js BOOTSTRAP everything` or `node check.js BOOTSTRAP load TOPIC COUNT`.
// Prints a line for each thing that was found to work; anything else ends it with exit code 1.
"use strict";

const assert = require("node:assert");
const { CompressionTypes, Kafka, logLevel } = require("kafkajs");

const [bootstrap, mode, topic, count] = process.argv.slice(2);
const retry = { initialRetryTime: 50, maxRetryTime: 500, retries: 50 };
const kafka = new Kafka({ brokers: [bootstrap], logLevel: logLevel.NOTHING, retry });

async function everything() {
  const admin = kafka.admin();
  await admin.connect();
  const wanted = { topic: "node", numPartitions: 2, configEntries: [{ name: "retention.ms", value: "9000" }] };
  assert(await admin.createTopics({ topics: [wanted] }));
  assert(!(await admin.createTopics({ topics: [wanted] })));
  await admin.createPartitions({ topicPartitions: [{ topic: "node", count: 3 }] });
  const described = await admin.fetchTopicMetadata({ topics: ["node"] });
  assert.strictEqual(described.topics[0].partitions.length, 3);
  const configs = await admin.describeConfigs({ resources: [{ type: 2, name: "node" }], includeSynonyms: false });
  const retention = configs.resources[0].configEntries.find((entry) => entry.configName === "retention.ms");
  assert.strictEqual(retention.configValue, "9000");
  console.log("admin");

  for (const compression of [CompressionTypes.None, CompressionTypes.GZIP]) {
    const producer = kafka.producer({ idempotent: true });
    await producer.connect();
    const messages = [...Array(90).keys()].map((i) => ({
      partition: i % 3, key: `key ${i}`, value: i % 7 ? `value ${i}` : null, headers: { number: `${i}` },
    }));
    const acks = await producer.send({ topic: "node", messages, compression });
    assert(acks.every((answer) => answer.errorCode === 0));
    await producer.disconnect();
  }
  const offsets = await admin.fetchTopicOffsets("node");
  assert.deepStrictEqual(offsets.map((each) => [each.low, each.high]), Array(3).fill(["0", "60"]));
  await admin.deleteTopicRecords({ topic: "node", partitions: [{ partition: 1, offset: "10" }] });
  const after = (await admin.fetchTopicOffsets("node")).find((each) => each.partition === 1);
  assert.strictEqual(after.low, "10");
  await admin.disconnect();
  console.log("producer");
}

async function load() {
  const producer = kafka.producer({ idempotent: true, maxInFlightRequests: 1 });
  await producer.connect();
  for (let first = 0; first < Number(count); first += 100) {
    const messages = [...Array(100).keys()].map((i) => ({ value: `${first + i}` }));
    await producer.send({ topic, messages });
    console.log(`sent ${first + 100}`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  await producer.disconnect();
  console.log("done");
}

(mode === "load" ? load() : everything()).catch((error) => {
  console.error(error);
  process.exit(1);
});
