#!/bin/sh
# Stand in for kafka-topics.sh, kafka-acls.sh and kafka-configs.sh: Apache Kafka's own tools, from the jars that
# the project's tests use.
unset PYTHONPATH LD_PRELOAD
case $(basename "$0" .sh) in
    kafka-topics) main=org.apache.kafka.tools.TopicCommand ;;
    kafka-acls) main=org.apache.kafka.tools.AclCommand ;;
    kafka-configs) main=kafka.admin.ConfigCommand ;;
esac
exec "$SUITE_PYTHON" -c 'import sys
from oncelog_devtools.apache_kafka import run_tool
print(run_tool(*sys.argv[1:]), end="")' "$main" "$@"
