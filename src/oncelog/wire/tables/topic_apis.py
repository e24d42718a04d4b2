"""Topics: creation, deletion, partitions, DeleteRecords. Table language: see oncelog.wire.schema."""

TABLE = """\
api CreateTopics 19 versions 2-7 offer 2-7 flexible 5
request
  topics                []CreatableTopic
    name                string
    num_partitions      int32
    replication_factor  int16
    assignments         []CreatableReplicaAssignment
      partition_index   int32
      broker_ids        []int32
    configs             []CreatableTopicConfig
      name              string
      value             string?                       =null
  timeout_ms            int32                         =60000
  validate_only         bool
response
  throttle_time_ms           int32
  topics                     []CreatableTopicResult
    name                     string
    topic_id                 uuid                      @7+
    error_code               int16
    error_message            string?                        =null
    topic_config_error_code  int16                     @5+  #0
    num_partitions           int32                     @5+  =-1
    replication_factor       int16                     @5+  =-1
    configs                  []CreatableTopicConfigs?  @5+
      name                   string
      value                  string?                        =null
      read_only              bool
      config_source          int8                           =-1
      is_sensitive           bool

api DeleteTopics 20 versions 1-6 offer 1-6 flexible 4
request
  topics       []DeleteTopicState  @6+
    name       string?                   =null
    topic_id   uuid
  topic_names  []string            @1-5
  timeout_ms   int32
response
  throttle_time_ms  int32
  responses         []DeletableTopicResult
    name            string?6+
    topic_id        uuid                    @6+
    error_code      int16
    error_message   string?                 @5+  =null

api CreatePartitions 37 versions 0-3 offer 0-3 flexible 2
request
  topics          []CreatePartitionsTopic
    name          string
    count         int32
    assignments   []CreatePartitionsAssignment?
      broker_ids  []int32
  timeout_ms      int32
  validate_only   bool
response
  throttle_time_ms  int32
  results           []CreatePartitionsTopicResult
    name            string
    error_code      int16
    error_message   string?                        =null

api DeleteRecords 21 versions 0-2 offer 0-2 flexible 2
request
  topics               []DeleteRecordsTopic
    name               string
    partitions         []DeleteRecordsPartition
      partition_index  int32
      offset           int64
  timeout_ms           int32
response
  throttle_time_ms     int32
  topics               []DeleteRecordsTopicResult
    name               string
    partitions         []DeleteRecordsPartitionResult
      partition_index  int32
      low_watermark    int64
      error_code       int16
"""
