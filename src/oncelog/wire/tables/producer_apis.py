"""Producer ids. Table language: see oncelog.wire.schema."""

TABLE = """\
api InitProducerId 22 versions 0-5 offer 0-5 flexible 2
request
  transactional_id        string?       =null
  transaction_timeout_ms  int32
  producer_id             int64    @3+  =-1
  producer_epoch          int16    @3+  =-1
response
  throttle_time_ms  int32
  error_code        int16
  producer_id       int64  =-1
  producer_epoch    int16

api DescribeProducers 61 versions 0-0 offer 0-0 flexible 0
request
  topics               []TopicRequest
    name               string
    partition_indexes  []int32
response
  throttle_time_ms                int32
  topics                          []TopicResponse
    name                          string
    partitions                    []PartitionResponse
      partition_index             int32
      error_code                  int16
      error_message               string?              =null
      active_producers            []ProducerState
        producer_id               int64
        producer_epoch            int32
        last_sequence             int32                =-1
        last_timestamp            int64                =-1
        coordinator_epoch         int32
        current_txn_start_offset  int64                =-1
"""
