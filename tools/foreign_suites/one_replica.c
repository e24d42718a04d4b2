/* Preload into librdkafka's test-runner: topics get one replica, because there is one broker.
 *
 *     cc -shared -fPIC -o one_replica.so one_replica.c -ldl
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

typedef void *(*new_topic)(const char *, int, int, char *, size_t);

void *rd_kafka_NewTopic_new(const char *topic, int partitions, int replicas, char *text, size_t size) {
    new_topic real = (new_topic)dlsym(RTLD_NEXT, "rd_kafka_NewTopic_new");
    return real(topic, partitions, replicas > 1 ? 1 : replicas, text, size);
}
