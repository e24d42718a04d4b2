// KafkaJS for the matrix of clients. The commands are listed in program.py of oncelog_devtools.client_matrix.
"use strict";

const readline = require("node:readline");
const { Kafka, logLevel } = require("kafkajs");

class Missing extends Error {}

const kafka = new Kafka({ brokers: [process.argv[2]], logLevel: logLevel.NOTHING });
const results = new Map();
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const plain = (error) => `${error.name}: ${error.message}`.replace(/\s+/g, " ").slice(0, 200);
const hasPending = () => [...results.values()].includes("pending");
const READ_LIMIT_MS = 100_000;
let producer, transaction, consumer, group;

async function start(kind, argument) {
  // KafkaJS documents maxInFlightRequests: 1 for idempotent producers.
  const idempotent = { idempotent: true, maxInFlightRequests: 1 };
  const settings = {
    default: {}, idempotent, transactional: { ...idempotent, transactionalId: argument },
    "give-up": { ...idempotent, retry: { retries: 3, maxRetryTime: Number(argument) } },
  }[kind];
  producer = kafka.producer(settings);
  await producer.connect();
}

function send(topic, partition, values) {
  for (const value of values) {
    results.set(value, "pending");
    const message = { topic, acks: -1, messages: [{ value, partition: Number(partition) }] };
    (transaction || producer).send(message).then(
      () => results.set(value, "ok"), (error) => results.set(value, plain(error)));
  }
}

async function flush(seconds) {
  for (const end = Date.now() + 1000 * seconds; hasPending() && Date.now() < end; ) await pause(10);
  const reply = ["results", ...[...results].map(([value, result]) => `${value}=${result}`)];
  for (const [value, result] of results) if (result !== "pending") results.delete(value);
  return reply;
}

async function end(how) {
  for (const limit = Date.now() + 20_000; hasPending() && Date.now() < limit; ) await pause(10);
  const ending = transaction;
  transaction = undefined;
  if (!ending) throw new Error("no open transaction");
  await ending[how]();
}

async function consume(topic, groupId, count, isolation, protocol, instance) {
  if (protocol === "consumer") throw new Missing("consumer() has no option for the group protocol");
  if (instance !== "-") throw new Missing("consumer() has no option for the group.instance.id");
  const level = isolation === "default" ? {} : { readUncommitted: false };
  group = groupId;
  consumer = kafka.consumer({ groupId, maxWaitTimeInMs: 200, ...level });
  const values = [];
  await consumer.connect();
  await consumer.subscribe({ topics: [topic], fromBeginning: true });
  await consumer.run({ autoCommit: false, eachMessage: async ({ message }) => { values.push(`${message.value}`); } });
  for (const limit = Date.now() + READ_LIMIT_MS; values.length < Number(count) && Date.now() < limit; ) await pause(20);
  return ["records", ...values];
}

async function run([name, ...words]) {
  switch (name) {
    case "version": return ["ok", require("kafkajs/package.json").version];
    case "producer": await start(words[0], words[1]); break;
    case "send": send(words[0], words[1], words.slice(2)); break;
    case "flush": return flush(Number(words[0]));
    case "begin": transaction = await producer.transaction(); break;
    case "commit": case "abort": await end(name); break;
    case "offsets": {
      const topics = [{ topic: words[0], partitions: [{ partition: 0, offset: words[1] }] }];
      await transaction.sendOffsets({ consumerGroupId: group, topics });
      break;
    }
    case "consume": return consume(...words);
    case "close": await consumer.disconnect(); break;
    default: throw new Error(`no command ${name}`);
  }
  return ["ok"];
}

async function main() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    let reply;
    try {
      reply = await run(line.split(" "));
    } catch (error) {
      reply = error instanceof Missing ? ["missing", error.message] : ["error", plain(error)];
    }
    console.log(reply.join("\t"));
  }
  process.exit(0); // an open transaction stays open, as after a crash
}

main();
