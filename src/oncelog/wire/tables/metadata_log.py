"""Records of Apache Kafka's __cluster_metadata. Table language: see oncelog.wire.schema.

Unlike other stored data, these records do not begin with a 16-bit version. In a record's value, three varints
precede the fields: the frame version, the record type and the version.

Source: apache/kafka metadata/src/main/resources/common/metadata.
"""

TABLE = """\
data TopicRecord versions 0-0 flexible 0
  name      string
  topic_id  uuid

data RemoveTopicRecord versions 0-0 flexible 0
  topic_id  uuid

data PartitionRecord versions 0-2 flexible 0
  partition_id              int32   =-1
  topic_id                  uuid
  replicas                  []int32
  isr                       []int32
  removing_replicas         []int32
  adding_replicas           []int32
  leader                    int32   =-1
  leader_recovery_state     int8    #0
  leader_epoch              int32   =-1
  partition_epoch           int32   =-1
  directories               []uuid  @1+
  eligible_leader_replicas  []int32? @2+ #1 =null
  last_known_elr            []int32? @2+ #2 =null

data PartitionChangeRecord versions 0-2 flexible 0
  partition_id              int32    =-1
  topic_id                  uuid
  isr                       []int32? #0 =null
  leader                    int32    #1 =-2
  replicas                  []int32? #2 =null
  removing_replicas         []int32? #3 =null
  adding_replicas           []int32? #4 =null
  leader_recovery_state     int8     #5 =-1
  directories               []uuid?  @1+ #8 =null
  eligible_leader_replicas  []int32? @2+ #6 =null
  last_known_elr            []int32? @2+ #7 =null

data ConfigRecord versions 0-0 flexible 0
  resource_type  int8
  resource_name  string
  name           string
  value          string?

data ProducerIdsRecord versions 0-0 flexible 0
  broker_id         int32
  broker_epoch      int64  =-1
  next_producer_id  int64

data AccessControlEntryRecord versions 0-0 flexible 0
  id               uuid
  resource_type    int8
  resource_name    string
  pattern_type     int8
  principal        string
  host             string
  operation        int8
  permission_type  int8

data RemoveAccessControlEntryRecord versions 0-0 flexible 0
  id  uuid

data UserScramCredentialRecord versions 0-0 flexible 0
  name        string
  mechanism   int8
  salt        bytes
  stored_key  bytes
  server_key  bytes
  iterations  int32

data RemoveUserScramCredentialRecord versions 0-0 flexible 0
  name       string
  mechanism  int8

data ClientQuotaRecord versions 0-0 flexible 0
  entity         []EntityData
    entity_type  string
    entity_name  string?
  key            string
  value          float64
  remove         bool
"""
