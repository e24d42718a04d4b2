"""Leaders, replicas, the quorum and features. Table language: see oncelog.wire.schema."""

TABLE = """\
api DescribeTopicPartitions 75 versions 0-0 offer 0-0 flexible 0
request
  topics                    []TopicRequest
    name                    string
  response_partition_limit  int32           =2000
  cursor                    Cursor?         =null
    topic_name              string
    partition_index         int32
response
  throttle_time_ms               int32
  topics                         []DescribeTopicPartitionsResponseTopic
    error_code                   int16
    name                         string?
    topic_id                     uuid
    is_internal                  bool
    partitions                   []DescribeTopicPartitionsResponsePartition
      error_code                 int16
      partition_index            int32
      leader_id                  int32
      leader_epoch               int32                                       =-1
      replica_nodes              []int32
      isr_nodes                  []int32
      eligible_leader_replicas   []int32?                                    =null
      last_known_elr             []int32?                                    =null
      offline_replicas           []int32
    topic_authorized_operations  int32                                       =-2147483648
  next_cursor                    Cursor?                                     =null
    topic_name                   string
    partition_index              int32

api ElectLeaders 43 versions 0-2 offer 0-2 flexible 2
request
  election_type     int8                @1+
  topic_partitions  []TopicPartitions?
    topic           string
    partitions      []int32
  timeout_ms        int32                    =60000
response
  throttle_time_ms          int32
  error_code                int16                    @1+
  replica_election_results  []ReplicaElectionResult
    topic                   string
    partition_result        []PartitionResult
      partition_id          int32
      error_code            int16
      error_message         string?

api AlterPartitionReassignments 45 versions 0-1 offer 0-1 flexible 0
request
  timeout_ms                       int32                         =60000
  allow_replication_factor_change  bool                     @1+  =true
  topics                           []ReassignableTopic
    name                           string
    partitions                     []ReassignablePartition
      partition_index              int32
      replicas                     []int32?                      =null
response
  throttle_time_ms                 int32
  allow_replication_factor_change  bool                             @1+  =true
  error_code                       int16
  error_message                    string?
  responses                        []ReassignableTopicResponse
    name                           string
    partitions                     []ReassignablePartitionResponse
      partition_index              int32
      error_code                   int16
      error_message                string?

api ListPartitionReassignments 46 versions 0-0 offer 0-0 flexible 0
request
  timeout_ms           int32                                =60000
  topics               []ListPartitionReassignmentsTopics?  =null
    name               string
    partition_indexes  []int32
response
  throttle_time_ms       int32
  error_code             int16
  error_message          string?
  topics                 []OngoingTopicReassignment
    name                 string
    partitions           []OngoingPartitionReassignment
      partition_index    int32
      replicas           []int32
      adding_replicas    []int32
      removing_replicas  []int32

api DescribeQuorum 55 versions 0-2 offer 0-2 flexible 0
request
  topics               []TopicData
    topic_name         string
    partitions         []PartitionData
      partition_index  int32
response
  error_code                      int16
  error_message                   string?          @2+
  topics                          []TopicData
    topic_name                    string
    partitions                    []PartitionData
      partition_index             int32
      error_code                  int16
      error_message               string?          @2+
      leader_id                   int32
      leader_epoch                int32
      high_watermark              int64
      current_voters              []ReplicaState
        replica_id                int32
        replica_directory_id      uuid             @2+
        log_end_offset            int64
        last_fetch_timestamp      int64            @1+  =-1
        last_caught_up_timestamp  int64            @1+  =-1
      observers                   []ReplicaState
        replica_id                int32
        replica_directory_id      uuid             @2+
        log_end_offset            int64
        last_fetch_timestamp      int64            @1+  =-1
        last_caught_up_timestamp  int64            @1+  =-1
  nodes                           []Node           @2+
    node_id                       int32
    listeners                     []Listener
      name                        string
      host                        string
      port                        uint16

api UpdateFeatures 57 versions 0-2 offer 0-2 flexible 0
request
  timeout_ms           int32                     =60000
  feature_updates      []FeatureUpdateKey
    feature            string
    max_version_level  int16
    allow_downgrade    bool                @0-0
    upgrade_type       int8                @1+   =1
  validate_only        bool                @1+
response
  throttle_time_ms  int32
  error_code        int16
  error_message     string?
  results           []UpdatableFeatureResult  @0-1
    feature         string
    error_code      int16
    error_message   string?
"""
