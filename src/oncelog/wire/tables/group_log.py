"""Records of __consumer_offsets: offsets and classic groups. Table language: see oncelog.wire.schema."""

TABLE = """\
data OffsetCommitKey versions 0-1 flexible 99
  group      string
  topic      string
  partition  int32

data OffsetCommitValue versions 0-4 flexible 4
  offset            int64
  leader_epoch      int32   @3+ =-1
  metadata          string
  commit_timestamp  int64
  expire_timestamp  int64   @1-1 =-1

data GroupMetadataKey versions 2-2 flexible 99
  group  string

data GroupMetadataValue versions 0-4 flexible 4
  protocol_type            string
  generation               int32
  protocol                 string?
  leader                   string?
  current_state_timestamp  int64             @2+ =-1
  members                  []MemberMetadata
    member_id              string
    group_instance_id      string?           @3+ =null
    client_id              string
    client_host            string
    rebalance_timeout      int32             @1+ =-1
    session_timeout        int32
    subscription           bytes
    assignment             bytes
"""
