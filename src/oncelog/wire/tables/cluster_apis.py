"""Metadata: versions, brokers, leaders and offsets. Table language: see oncelog.wire.schema."""

TABLE = """\
api ListOffsets 2 versions 1-11 offer 1-11 flexible 6
request
  replica_id                int32
  isolation_level           int8                    @2+
  topics                    []ListOffsetsTopic
    name                    string
    partitions              []ListOffsetsPartition
      partition_index       int32
      current_leader_epoch  int32                   @4+   =-1
      timestamp             int64
  timeout_ms                int32                   @10+
response
  throttle_time_ms     int32                           @2+
  topics               []ListOffsetsTopicResponse
    name               string
    partitions         []ListOffsetsPartitionResponse
      partition_index  int32
      error_code       int16
      timestamp        int64                                =-1
      offset           int64                                =-1
      leader_epoch     int32                           @4+  =-1

api Metadata 3 versions 0-13 offer 0-13 flexible 9
request
  topics                                 []MetadataRequestTopic?1+
    topic_id                             uuid                       @10+
    name                                 string?10+
  allow_auto_topic_creation              bool                       @4+    =true
  include_cluster_authorized_operations  bool                       @8-10
  include_topic_authorized_operations    bool                       @8+
response
  throttle_time_ms               int32                        @3+
  brokers                        []MetadataResponseBroker
    node_id                      int32
    host                         string
    port                         int32
    rack                         string?                      @1+    =null
  cluster_id                     string?                      @2+    =null
  controller_id                  int32                        @1+    =-1
  topics                         []MetadataResponseTopic
    error_code                   int16
    name                         string?12+
    topic_id                     uuid                         @10+
    is_internal                  bool                         @1+
    partitions                   []MetadataResponsePartition
      error_code                 int16
      partition_index            int32
      leader_id                  int32
      leader_epoch               int32                        @7+    =-1
      replica_nodes              []int32
      isr_nodes                  []int32
      offline_replicas           []int32                      @5+
    topic_authorized_operations  int32                        @8+    =-2147483648
  cluster_authorized_operations  int32                        @8-10  =-2147483648
  error_code                     int16                        @13+

api ApiVersions 18 versions 0-4 offer 0-4 flexible 3
request
  client_software_name     string  @3+
  client_software_version  string  @3+
response
  error_code                int16
  api_keys                  []ApiVersion
    api_key                 int16
    min_version             int16
    max_version             int16
  throttle_time_ms          int32                  @1+
  supported_features        []SupportedFeatureKey  @3+  #0
    name                    string
    min_version             int16
    max_version             int16
  finalized_features_epoch  int64                  @3+  #1 =-1
  finalized_features        []FinalizedFeatureKey  @3+  #2
    name                    string
    max_version_level       int16
    min_version_level       int16
  zk_migration_ready        bool                   @3+  #3

api FindCoordinator 10 versions 0-6 offer 0-6 flexible 3
request
  key               string    @0-3
  key_type          int8      @1+
  coordinator_keys  []string  @4+
response
  throttle_time_ms  int32          @1+
  error_code        int16          @0-3
  error_message     string?        @1-3  =null
  node_id           int32          @0-3
  host              string         @0-3
  port              int32          @0-3
  coordinators      []Coordinator  @4+
    key             string
    node_id         int32
    host            string
    port            int32
    error_code      int16
    error_message   string?              =null

api OffsetForLeaderEpoch 23 versions 2-4 offer 2-4 flexible 4
request
  replica_id                int32                       @3+  =-2
  topics                    []OffsetForLeaderTopic
    topic                   string
    partitions              []OffsetForLeaderPartition
      partition             int32
      current_leader_epoch  int32                            =-1
      leader_epoch          int32
response
  throttle_time_ms  int32
  topics            []OffsetForLeaderTopicResult
    topic           string
    partitions      []EpochEndOffset
      error_code    int16
      partition     int32
      leader_epoch  int32                         =-1
      end_offset    int64                         =-1

api DescribeCluster 60 versions 0-2 offer 0-2 flexible 0
request
  include_cluster_authorized_operations  bool
  endpoint_type                          int8  @1+  =1
  include_fenced_brokers                 bool  @2+
response
  throttle_time_ms               int32
  error_code                     int16
  error_message                  string?                       =null
  endpoint_type                  int8                     @1+  =1
  cluster_id                     string
  controller_id                  int32                         =-1
  brokers                        []DescribeClusterBroker
    broker_id                    int32
    host                         string
    port                         int32
    rack                         string?                       =null
    is_fenced                    bool                     @2+
  cluster_authorized_operations  int32                         =-2147483648
"""
