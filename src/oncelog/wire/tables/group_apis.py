"""Classic consumer groups: membership and administration. Table language: see oncelog.wire.schema."""

TABLE = """\
api JoinGroup 11 versions 0-9 offer 0-9 flexible 6
request
  group_id              string
  session_timeout_ms    int32
  rebalance_timeout_ms  int32                       @1+ =-1
  member_id             string
  group_instance_id     string?                     @5+ =null
  protocol_type         string
  protocols             []JoinGroupRequestProtocol
    name                string
    metadata            bytes
  reason                string?                     @8+ =null
response
  throttle_time_ms     int32                      @2+
  error_code           int16
  generation_id        int32                      =-1
  protocol_type        string?                    @7+ =null
  protocol_name        string?7+
  leader               string
  skip_assignment      bool                       @9+
  member_id            string
  members              []JoinGroupResponseMember
    member_id          string
    group_instance_id  string?                    @5+ =null
    metadata           bytes

api Heartbeat 12 versions 0-4 offer 0-4 flexible 4
request
  group_id           string
  generation_id      int32
  member_id          string
  group_instance_id  string?  @3+ =null
response
  throttle_time_ms  int32  @1+
  error_code        int16

api LeaveGroup 13 versions 0-5 offer 0-5 flexible 4
request
  group_id             string
  member_id            string            @0-2
  members              []MemberIdentity  @3+
    member_id          string
    group_instance_id  string?           =null
    reason             string?           @5+ =null
response
  throttle_time_ms     int32             @1+
  error_code           int16
  members              []MemberResponse  @3+
    member_id          string
    group_instance_id  string?
    error_code         int16

api SyncGroup 14 versions 0-5 offer 0-5 flexible 4
request
  group_id           string
  generation_id      int32
  member_id          string
  group_instance_id  string?                       @3+ =null
  protocol_type      string?                       @5+ =null
  protocol_name      string?                       @5+ =null
  assignments        []SyncGroupRequestAssignment
    member_id        string
    assignment       bytes
response
  throttle_time_ms  int32    @1+
  error_code        int16
  protocol_type     string?  @5+ =null
  protocol_name     string?  @5+ =null
  assignment        bytes

api DescribeGroups 15 versions 0-6 offer 0-6 flexible 5
request
  groups                         []string
  include_authorized_operations  bool      @3+
response
  throttle_time_ms         int32                   @1+
  groups                   []DescribedGroup
    error_code             int16
    error_message          string?                 @6+ =null
    group_id               string
    group_state            string
    protocol_type          string
    protocol_data          string
    members                []DescribedGroupMember
      member_id            string
      group_instance_id    string?                 @4+ =null
      client_id            string
      client_host          string
      member_metadata      bytes
      member_assignment    bytes
    authorized_operations  int32                   @3+ =-2147483648

api ListGroups 16 versions 0-5 offer 0-5 flexible 3
request
  states_filter  []string  @4+
  types_filter   []string  @5+
response
  throttle_time_ms  int32          @1+
  error_code        int16
  groups            []ListedGroup
    group_id        string
    protocol_type   string
    group_state     string         @4+
    group_type      string         @5+

api DeleteGroups 42 versions 0-2 offer 0-2 flexible 2
request
  groups_names  []string
response
  throttle_time_ms  int32
  results           []DeletableGroupResult
    group_id        string
    error_code      int16
"""
