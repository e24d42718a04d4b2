"""Records of __consumer_offsets: groups of KIP-848. Table language: see oncelog.wire.schema."""

TABLE = """\
data ConsumerGroupMetadataKey versions 3-3 flexible 99
  group_id  string

data ConsumerGroupMetadataValue versions 0-0 flexible 0
  epoch  int32

data ConsumerGroupPartitionMetadataKey versions 4-4 flexible 99
  group_id  string

data ConsumerGroupPartitionMetadataValue versions 0-0 flexible 0
  topics                []TopicMetadata
    topic_id            uuid
    topic_name          string
    num_partitions      int32
    partition_metadata  []PartitionMetadata
      partition         int32
      racks             []string

data ConsumerGroupMemberMetadataKey versions 5-5 flexible 99
  group_id   string
  member_id  string

data ConsumerGroupMemberMetadataValue versions 0-0 flexible 0
  instance_id              string?
  rack_id                  string?
  client_id                string
  client_host              string
  subscribed_topic_names   []string
  subscribed_topic_regex   string?
  rebalance_timeout_ms     int32                   =-1
  server_assignor          string?
  classic_member_metadata  ClassicMemberMetadata?  #0
    session_timeout_ms     int32
    supported_protocols    []ClassicProtocol
      name                 string
      metadata             bytes

data ConsumerGroupTargetAssignmentMetadataKey versions 6-6 flexible 99
  group_id  string

data ConsumerGroupTargetAssignmentMetadataValue versions 0-0 flexible 0
  assignment_epoch  int32

data ConsumerGroupTargetAssignmentMemberKey versions 7-7 flexible 99
  group_id   string
  member_id  string

data ConsumerGroupTargetAssignmentMemberValue versions 0-0 flexible 0
  topic_partitions  []TopicPartition
    topic_id        uuid
    partitions      []int32

data ConsumerGroupCurrentMemberAssignmentKey versions 8-8 flexible 99
  group_id   string
  member_id  string

data ConsumerGroupCurrentMemberAssignmentValue versions 0-0 flexible 0
  member_epoch                   int32
  previous_member_epoch          int32
  state                          int8
  assigned_partitions            []TopicPartitions
    topic_id                     uuid
    partitions                   []int32
  partitions_pending_revocation  []TopicPartitions
    topic_id                     uuid
    partitions                   []int32
"""
