"""Client quotas. Table language: see oncelog.wire.schema."""

TABLE = """\
api DescribeClientQuotas 48 versions 0-1 offer 0-1 flexible 1
request
  components     []ComponentData
    entity_type  string
    match_type   int8
    match        string?          =null
  strict         bool
response
  throttle_time_ms  int32
  error_code        int16
  error_message     string?        =null
  entries           []EntryData?
    entity          []EntityData
      entity_type   string
      entity_name   string?        =null
    values          []ValueData
      key           string
      value         float64

api AlterClientQuotas 49 versions 0-1 offer 0-1 flexible 1
request
  entries          []EntryData
    entity         []EntityData
      entity_type  string
      entity_name  string?       =null
    ops            []OpData
      key          string
      value        float64
      remove       bool
  validate_only    bool
response
  throttle_time_ms  int32
  entries           []EntryData
    error_code      int16
    error_message   string?       =null
    entity          []EntityData
      entity_type   string
      entity_name   string?       =null
"""
