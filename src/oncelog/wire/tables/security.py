"""Authentication and authorization: SASL, ACLs, SCRAM users. Table language: see oncelog.wire.schema."""

TABLE = """\
api SaslHandshake 17 versions 1-1 offer 0-1 flexible 99
request
  mechanism  string
response
  error_code  int16
  mechanisms  []string

api SaslAuthenticate 36 versions 0-2 offer 0-2 flexible 2
request
  auth_bytes  bytes
response
  error_code           int16
  error_message        string?       =null
  auth_bytes           bytes
  session_lifetime_ms  int64    @1+

api DescribeAcls 29 versions 1-3 offer 1-3 flexible 2
request
  resource_type_filter  int8
  resource_name_filter  string?  =null
  pattern_type_filter   int8     =3
  principal_filter      string?  =null
  host_filter           string?  =null
  operation             int8
  permission_type       int8
response
  throttle_time_ms   int32
  error_code         int16
  error_message      string?                 =null
  resources          []DescribeAclsResource
    resource_type    int8
    resource_name    string
    pattern_type     int8                    =3
    acls             []AclDescription
      principal        string
      host             string
      operation        int8
      permission_type  int8

api CreateAcls 30 versions 1-3 offer 1-3 flexible 2
request
  creations                []AclCreation
    resource_type          int8
    resource_name          string
    resource_pattern_type  int8           =3
    principal              string
    host                   string
    operation              int8
    permission_type        int8
response
  throttle_time_ms  int32
  results           []AclCreationResult
    error_code      int16
    error_message   string?              =null

api DeleteAcls 31 versions 1-3 offer 1-3 flexible 2
request
  filters                 []DeleteAclsFilter
    resource_type_filter  int8
    resource_name_filter  string?             =null
    pattern_type_filter   int8                =3
    principal_filter      string?             =null
    host_filter           string?             =null
    operation             int8
    permission_type       int8
response
  throttle_time_ms   int32
  filter_results     []DeleteAclsFilterResult
    error_code       int16
    error_message    string?                   =null
    matching_acls    []DeleteAclsMatchingAcl
      error_code       int16
      error_message    string?                 =null
      resource_type    int8
      resource_name    string
      pattern_type     int8                    =3
      principal        string
      host             string
      operation        int8
      permission_type  int8

api DescribeUserScramCredentials 50 versions 0-0 offer 0-0 flexible 0
request
  users   []UserName?
    name  string
response
  throttle_time_ms  int32
  error_code        int16
  error_message     string?                                 =null
  results           []DescribeUserScramCredentialsResult
    user             string
    error_code       int16
    error_message    string?                                =null
    credential_infos  []CredentialInfo
      mechanism       int8
      iterations      int32

api AlterUserScramCredentials 51 versions 0-0 offer 0-0 flexible 0
request
  deletions    []ScramCredentialDeletion
    name       string
    mechanism  int8
  upsertions         []ScramCredentialUpsertion
    name             string
    mechanism        int8
    iterations       int32
    salt             bytes
    salted_password  bytes
response
  throttle_time_ms  int32
  results           []AlterUserScramCredentialsResult
    user           string
    error_code     int16
    error_message  string?                            =null
"""
