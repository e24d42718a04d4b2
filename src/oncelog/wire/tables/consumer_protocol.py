"""Subscriptions and assignments of classic consumer groups. Table language: see oncelog.wire.schema."""

TABLE = """\
data ConsumerProtocolSubscription versions 0-3 flexible 99
  topics            []string
  user_data         bytes?            =null
  owned_partitions  []TopicPartition  @1+
    topic           string
    partitions      []int32
  generation_id     int32             @2+ =-1
  rack_id           string?           @3+ =null

data ConsumerProtocolAssignment versions 0-3 flexible 99
  assigned_partitions  []TopicPartition
    topic              string
    partitions         []int32
  user_data            bytes?            =null

data StickyAssignorUserData versions 0-1 flexible 99
  previous_assignment  []TopicAssignment
    topic              string
    partitions         []int32
  generation           int32              @1+ =-1

data CooperativeStickyAssignorUserData versions 0-0 flexible 99
  generation  int32
"""
