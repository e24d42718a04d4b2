# Written by `python -m oncelog.wire.stubs`; do not edit.
from oncelog.wire.message import Data as Data
from oncelog.wire.message import Part as Part

DATA: dict[str, type[Data]]

class TransactionLogKey(Data):
    transactional_id: str
    def __init__(
        self,
        *,
        transactional_id: str = ...,
    ) -> None: ...

class TransactionLogValue(Data):
    class PartitionsSchema(Part):
        topic: str
        partition_ids: list[int]
        def __init__(
            self,
            *,
            topic: str = ...,
            partition_ids: list[int] = ...,
        ) -> None: ...

    producer_id: int
    previous_producer_id: int
    next_producer_id: int
    producer_epoch: int
    transaction_timeout_ms: int
    transaction_status: int
    transaction_partitions: list[TransactionLogValue.PartitionsSchema] | None
    transaction_last_update_timestamp_ms: int
    transaction_start_timestamp_ms: int
    client_transaction_version: int
    def __init__(
        self,
        *,
        producer_id: int = ...,
        previous_producer_id: int = ...,
        next_producer_id: int = ...,
        producer_epoch: int = ...,
        transaction_timeout_ms: int = ...,
        transaction_status: int = ...,
        transaction_partitions: list[TransactionLogValue.PartitionsSchema] | None = ...,
        transaction_last_update_timestamp_ms: int = ...,
        transaction_start_timestamp_ms: int = ...,
        client_transaction_version: int = ...,
    ) -> None: ...

class OffsetCommitKey(Data):
    group: str
    topic: str
    partition: int
    def __init__(
        self,
        *,
        group: str = ...,
        topic: str = ...,
        partition: int = ...,
    ) -> None: ...

class OffsetCommitValue(Data):
    offset: int
    leader_epoch: int
    metadata: str
    commit_timestamp: int
    expire_timestamp: int
    def __init__(
        self,
        *,
        offset: int = ...,
        leader_epoch: int = ...,
        metadata: str = ...,
        commit_timestamp: int = ...,
        expire_timestamp: int = ...,
    ) -> None: ...

class GroupMetadataKey(Data):
    group: str
    def __init__(
        self,
        *,
        group: str = ...,
    ) -> None: ...

class GroupMetadataValue(Data):
    class MemberMetadata(Part):
        member_id: str
        group_instance_id: str | None
        client_id: str
        client_host: str
        rebalance_timeout: int
        session_timeout: int
        subscription: bytes
        assignment: bytes
        def __init__(
            self,
            *,
            member_id: str = ...,
            group_instance_id: str | None = ...,
            client_id: str = ...,
            client_host: str = ...,
            rebalance_timeout: int = ...,
            session_timeout: int = ...,
            subscription: bytes = ...,
            assignment: bytes = ...,
        ) -> None: ...

    protocol_type: str
    generation: int
    protocol: str | None
    leader: str | None
    current_state_timestamp: int
    members: list[GroupMetadataValue.MemberMetadata]
    def __init__(
        self,
        *,
        protocol_type: str = ...,
        generation: int = ...,
        protocol: str | None = ...,
        leader: str | None = ...,
        current_state_timestamp: int = ...,
        members: list[GroupMetadataValue.MemberMetadata] = ...,
    ) -> None: ...

class ConsumerGroupMetadataKey(Data):
    group_id: str
    def __init__(
        self,
        *,
        group_id: str = ...,
    ) -> None: ...

class ConsumerGroupMetadataValue(Data):
    epoch: int
    def __init__(
        self,
        *,
        epoch: int = ...,
    ) -> None: ...

class ConsumerGroupPartitionMetadataKey(Data):
    group_id: str
    def __init__(
        self,
        *,
        group_id: str = ...,
    ) -> None: ...

class ConsumerGroupPartitionMetadataValue(Data):
    class TopicMetadata(Part):
        topic_id: bytes
        topic_name: str
        num_partitions: int
        partition_metadata: list[ConsumerGroupPartitionMetadataValue.PartitionMetadata]
        def __init__(
            self,
            *,
            topic_id: bytes = ...,
            topic_name: str = ...,
            num_partitions: int = ...,
            partition_metadata: list[ConsumerGroupPartitionMetadataValue.PartitionMetadata] = ...,
        ) -> None: ...

    class PartitionMetadata(Part):
        partition: int
        racks: list[str]
        def __init__(
            self,
            *,
            partition: int = ...,
            racks: list[str] = ...,
        ) -> None: ...

    topics: list[ConsumerGroupPartitionMetadataValue.TopicMetadata]
    def __init__(
        self,
        *,
        topics: list[ConsumerGroupPartitionMetadataValue.TopicMetadata] = ...,
    ) -> None: ...

class ConsumerGroupMemberMetadataKey(Data):
    group_id: str
    member_id: str
    def __init__(
        self,
        *,
        group_id: str = ...,
        member_id: str = ...,
    ) -> None: ...

class ConsumerGroupMemberMetadataValue(Data):
    class ClassicMemberMetadata(Part):
        session_timeout_ms: int
        supported_protocols: list[ConsumerGroupMemberMetadataValue.ClassicProtocol]
        def __init__(
            self,
            *,
            session_timeout_ms: int = ...,
            supported_protocols: list[ConsumerGroupMemberMetadataValue.ClassicProtocol] = ...,
        ) -> None: ...

    class ClassicProtocol(Part):
        name: str
        metadata: bytes
        def __init__(
            self,
            *,
            name: str = ...,
            metadata: bytes = ...,
        ) -> None: ...

    instance_id: str | None
    rack_id: str | None
    client_id: str
    client_host: str
    subscribed_topic_names: list[str]
    subscribed_topic_regex: str | None
    rebalance_timeout_ms: int
    server_assignor: str | None
    classic_member_metadata: ConsumerGroupMemberMetadataValue.ClassicMemberMetadata | None
    def __init__(
        self,
        *,
        instance_id: str | None = ...,
        rack_id: str | None = ...,
        client_id: str = ...,
        client_host: str = ...,
        subscribed_topic_names: list[str] = ...,
        subscribed_topic_regex: str | None = ...,
        rebalance_timeout_ms: int = ...,
        server_assignor: str | None = ...,
        classic_member_metadata: ConsumerGroupMemberMetadataValue.ClassicMemberMetadata | None = ...,
    ) -> None: ...

class ConsumerGroupTargetAssignmentMetadataKey(Data):
    group_id: str
    def __init__(
        self,
        *,
        group_id: str = ...,
    ) -> None: ...

class ConsumerGroupTargetAssignmentMetadataValue(Data):
    assignment_epoch: int
    def __init__(
        self,
        *,
        assignment_epoch: int = ...,
    ) -> None: ...

class ConsumerGroupTargetAssignmentMemberKey(Data):
    group_id: str
    member_id: str
    def __init__(
        self,
        *,
        group_id: str = ...,
        member_id: str = ...,
    ) -> None: ...

class ConsumerGroupTargetAssignmentMemberValue(Data):
    class TopicPartition(Part):
        topic_id: bytes
        partitions: list[int]
        def __init__(
            self,
            *,
            topic_id: bytes = ...,
            partitions: list[int] = ...,
        ) -> None: ...

    topic_partitions: list[ConsumerGroupTargetAssignmentMemberValue.TopicPartition]
    def __init__(
        self,
        *,
        topic_partitions: list[ConsumerGroupTargetAssignmentMemberValue.TopicPartition] = ...,
    ) -> None: ...

class ConsumerGroupCurrentMemberAssignmentKey(Data):
    group_id: str
    member_id: str
    def __init__(
        self,
        *,
        group_id: str = ...,
        member_id: str = ...,
    ) -> None: ...

class ConsumerGroupCurrentMemberAssignmentValue(Data):
    class TopicPartitions(Part):
        topic_id: bytes
        partitions: list[int]
        def __init__(
            self,
            *,
            topic_id: bytes = ...,
            partitions: list[int] = ...,
        ) -> None: ...

    member_epoch: int
    previous_member_epoch: int
    state: int
    assigned_partitions: list[ConsumerGroupCurrentMemberAssignmentValue.TopicPartitions]
    partitions_pending_revocation: list[ConsumerGroupCurrentMemberAssignmentValue.TopicPartitions]
    def __init__(
        self,
        *,
        member_epoch: int = ...,
        previous_member_epoch: int = ...,
        state: int = ...,
        assigned_partitions: list[ConsumerGroupCurrentMemberAssignmentValue.TopicPartitions] = ...,
        partitions_pending_revocation: list[ConsumerGroupCurrentMemberAssignmentValue.TopicPartitions] = ...,
    ) -> None: ...

class ConsumerProtocolSubscription(Data):
    class TopicPartition(Part):
        topic: str
        partitions: list[int]
        def __init__(
            self,
            *,
            topic: str = ...,
            partitions: list[int] = ...,
        ) -> None: ...

    topics: list[str]
    user_data: bytes | None
    owned_partitions: list[ConsumerProtocolSubscription.TopicPartition]
    generation_id: int
    rack_id: str | None
    def __init__(
        self,
        *,
        topics: list[str] = ...,
        user_data: bytes | None = ...,
        owned_partitions: list[ConsumerProtocolSubscription.TopicPartition] = ...,
        generation_id: int = ...,
        rack_id: str | None = ...,
    ) -> None: ...

class ConsumerProtocolAssignment(Data):
    class TopicPartition(Part):
        topic: str
        partitions: list[int]
        def __init__(
            self,
            *,
            topic: str = ...,
            partitions: list[int] = ...,
        ) -> None: ...

    assigned_partitions: list[ConsumerProtocolAssignment.TopicPartition]
    user_data: bytes | None
    def __init__(
        self,
        *,
        assigned_partitions: list[ConsumerProtocolAssignment.TopicPartition] = ...,
        user_data: bytes | None = ...,
    ) -> None: ...

class StickyAssignorUserData(Data):
    class TopicAssignment(Part):
        topic: str
        partitions: list[int]
        def __init__(
            self,
            *,
            topic: str = ...,
            partitions: list[int] = ...,
        ) -> None: ...

    previous_assignment: list[StickyAssignorUserData.TopicAssignment]
    generation: int
    def __init__(
        self,
        *,
        previous_assignment: list[StickyAssignorUserData.TopicAssignment] = ...,
        generation: int = ...,
    ) -> None: ...

class CooperativeStickyAssignorUserData(Data):
    generation: int
    def __init__(
        self,
        *,
        generation: int = ...,
    ) -> None: ...

class TopicRecord(Data):
    name: str
    topic_id: bytes
    def __init__(
        self,
        *,
        name: str = ...,
        topic_id: bytes = ...,
    ) -> None: ...

class RemoveTopicRecord(Data):
    topic_id: bytes
    def __init__(
        self,
        *,
        topic_id: bytes = ...,
    ) -> None: ...

class PartitionRecord(Data):
    partition_id: int
    topic_id: bytes
    replicas: list[int]
    isr: list[int]
    removing_replicas: list[int]
    adding_replicas: list[int]
    leader: int
    leader_recovery_state: int
    leader_epoch: int
    partition_epoch: int
    directories: list[bytes]
    eligible_leader_replicas: list[int] | None
    last_known_elr: list[int] | None
    def __init__(
        self,
        *,
        partition_id: int = ...,
        topic_id: bytes = ...,
        replicas: list[int] = ...,
        isr: list[int] = ...,
        removing_replicas: list[int] = ...,
        adding_replicas: list[int] = ...,
        leader: int = ...,
        leader_recovery_state: int = ...,
        leader_epoch: int = ...,
        partition_epoch: int = ...,
        directories: list[bytes] = ...,
        eligible_leader_replicas: list[int] | None = ...,
        last_known_elr: list[int] | None = ...,
    ) -> None: ...

class PartitionChangeRecord(Data):
    partition_id: int
    topic_id: bytes
    isr: list[int] | None
    leader: int
    replicas: list[int] | None
    removing_replicas: list[int] | None
    adding_replicas: list[int] | None
    leader_recovery_state: int
    directories: list[bytes] | None
    eligible_leader_replicas: list[int] | None
    last_known_elr: list[int] | None
    def __init__(
        self,
        *,
        partition_id: int = ...,
        topic_id: bytes = ...,
        isr: list[int] | None = ...,
        leader: int = ...,
        replicas: list[int] | None = ...,
        removing_replicas: list[int] | None = ...,
        adding_replicas: list[int] | None = ...,
        leader_recovery_state: int = ...,
        directories: list[bytes] | None = ...,
        eligible_leader_replicas: list[int] | None = ...,
        last_known_elr: list[int] | None = ...,
    ) -> None: ...

class ConfigRecord(Data):
    resource_type: int
    resource_name: str
    name: str
    value: str | None
    def __init__(
        self,
        *,
        resource_type: int = ...,
        resource_name: str = ...,
        name: str = ...,
        value: str | None = ...,
    ) -> None: ...

class ProducerIdsRecord(Data):
    broker_id: int
    broker_epoch: int
    next_producer_id: int
    def __init__(
        self,
        *,
        broker_id: int = ...,
        broker_epoch: int = ...,
        next_producer_id: int = ...,
    ) -> None: ...

class AccessControlEntryRecord(Data):
    id: bytes
    resource_type: int
    resource_name: str
    pattern_type: int
    principal: str
    host: str
    operation: int
    permission_type: int
    def __init__(
        self,
        *,
        id: bytes = ...,
        resource_type: int = ...,
        resource_name: str = ...,
        pattern_type: int = ...,
        principal: str = ...,
        host: str = ...,
        operation: int = ...,
        permission_type: int = ...,
    ) -> None: ...

class RemoveAccessControlEntryRecord(Data):
    id: bytes
    def __init__(
        self,
        *,
        id: bytes = ...,
    ) -> None: ...

class UserScramCredentialRecord(Data):
    name: str
    mechanism: int
    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int
    def __init__(
        self,
        *,
        name: str = ...,
        mechanism: int = ...,
        salt: bytes = ...,
        stored_key: bytes = ...,
        server_key: bytes = ...,
        iterations: int = ...,
    ) -> None: ...

class RemoveUserScramCredentialRecord(Data):
    name: str
    mechanism: int
    def __init__(
        self,
        *,
        name: str = ...,
        mechanism: int = ...,
    ) -> None: ...

class ClientQuotaRecord(Data):
    class EntityData(Part):
        entity_type: str
        entity_name: str | None
        def __init__(
            self,
            *,
            entity_type: str = ...,
            entity_name: str | None = ...,
        ) -> None: ...

    entity: list[ClientQuotaRecord.EntityData]
    key: str
    value: float
    remove: bool
    def __init__(
        self,
        *,
        entity: list[ClientQuotaRecord.EntityData] = ...,
        key: str = ...,
        value: float = ...,
        remove: bool = ...,
    ) -> None: ...
