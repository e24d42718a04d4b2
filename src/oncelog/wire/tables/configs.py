"""Settings and log directories. Table language: see oncelog.wire.schema."""

TABLE = """\
api DescribeConfigs 32 versions 1-4 offer 1-4 flexible 4
request
  resources              []DescribeConfigsResource
    resource_type        int8
    resource_name        string
    configuration_keys   []string?
  include_synonyms       bool
  include_documentation  bool                       @3+
response
  throttle_time_ms   int32
  results            []DescribeConfigsResult
    error_code       int16
    error_message    string?                               =null
    resource_type    int8
    resource_name    string
    configs          []DescribeConfigsResourceResult
      name           string
      value          string?                               =null
      read_only      bool
      config_source  int8                                  =-1
      is_sensitive   bool
      synonyms       []DescribeConfigsSynonym
        name         string
        value        string?                               =null
        source       int8
      config_type    int8                             @3+
      documentation  string?                          @3+  =null

api AlterConfigs 33 versions 0-2 offer 0-2 flexible 2
request
  resources        []AlterConfigsResource
    resource_type  int8
    resource_name  string
    configs        []AlterableConfig
      name         string
      value        string?                 =null
  validate_only    bool
response
  throttle_time_ms  int32
  responses         []AlterConfigsResourceResponse
    error_code      int16
    error_message   string?                         =null
    resource_type   int8
    resource_name   string

api IncrementalAlterConfigs 44 versions 0-1 offer 0-1 flexible 1
request
  resources             []AlterConfigsResource
    resource_type       int8
    resource_name       string
    configs             []AlterableConfig
      name              string
      config_operation  int8
      value             string?                 =null
  validate_only         bool
response
  throttle_time_ms  int32
  responses         []AlterConfigsResourceResponse
    error_code      int16
    error_message   string?                         =null
    resource_type   int8
    resource_name   string

api DescribeLogDirs 35 versions 1-5 offer 1-5 flexible 2
request
  topics        []DescribableLogDirTopic?
    topic       string
    partitions  []int32
response
  throttle_time_ms       int32
  error_code             int16                       @3+
  results                []DescribeLogDirsResult
    error_code           int16
    log_dir              string
    topics               []DescribeLogDirsTopic
      name               string
      partitions         []DescribeLogDirsPartition
        partition_index  int32
        partition_size   int64
        offset_lag       int64
        is_future_key    bool
    total_bytes          int64                       @4+  =-1
    usable_bytes         int64                       @4+  =-1
    is_cordoned          bool                        @5+

api AlterReplicaLogDirs 34 versions 1-2 offer 1-2 flexible 2
request
  dirs            []AlterReplicaLogDir
    path          string
    topics        []AlterReplicaLogDirTopic
      name        string
      partitions  []int32
response
  throttle_time_ms     int32
  results              []AlterReplicaLogDirTopicResult
    topic_name         string
    partitions         []AlterReplicaLogDirPartitionResult
      partition_index  int32
      error_code       int16

api ListConfigResources 74 versions 0-1 offer 0-1 flexible 0
request
  resource_types  []int8  @1+
response
  throttle_time_ms  int32
  error_code        int16
  config_resources  []ConfigResource
    resource_name   string
    resource_type   int8              @1+  =16
"""
