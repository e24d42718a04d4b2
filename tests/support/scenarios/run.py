"""A scenario carried out on one broker, over real sockets."""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from typing import Any, NamedTuple

from oncelog.wire.frames import decode_response
from oncelog.wire.messages import API_BY_NAME, Api
from support.scenarios.consumer_groups import ConsumerGroupSteps
from support.scenarios.context import BrokerUnderTest, Context, Verbs
from support.scenarios.groups import GroupSteps
from support.scenarios.reader import REQUEST, RESPONSE, Scenario
from support.scenarios.records import RecordSteps
from support.scenarios.topics import STEP_S
from support.scenarios.transactions import TransactionSteps
from support.scenarios.values import Mismatch, add_topic_ids, build, match, read_yaml, resolve
from support.wait import attempts, pause


class Run:
    """One run of a scenario: its steps in order, each by the verb that it begins with."""

    def __init__(self, scenario: Scenario, version: int | None, broker: BrokerUnderTest) -> None:
        self._scenario = scenario
        self._context = context = Context(scenario, version, broker)
        self._exchange = WrittenRequests(context)
        self._verbs: Verbs = {
            **RecordSteps(context).verbs,
            **TransactionSteps(context).verbs,
            **GroupSteps(context).verbs,
            **ConsumerGroupSteps(context).verbs,
            "on": self._on,
            "restart": lambda: context.restart_broker(kill=False),
            "kill": lambda: context.restart_broker(kill=True),
            "eventually": self._eventually,
            "wait": self._wait,
        }

    def run(self) -> None:
        """Carry out all steps. Raise AssertionError with the step that failed."""
        try:
            for step in self._scenario.steps:
                try:
                    self._run_step(step)
                except (Mismatch, AssertionError) as error:
                    raise AssertionError(
                        f"{self._scenario.file}.md, {self._scenario.title}:\n{step}\n{error}"
                    ) from None
            self._exchange.check_all_answered()
        finally:
            self._context.disconnect()

    def _run_step(self, step: str) -> None:
        if request := REQUEST.fullmatch(step):
            self._exchange.send(*request.groups())
        elif response := RESPONSE.fullmatch(step):
            self._exchange.receive(*response.groups())
        else:
            verb, *words = step.split()
            self._verbs[verb](*words)

    def _on(self, connection: str) -> None:
        self._context.connection = connection

    def _eventually(self, verb: str, *words: str) -> None:
        """Repeat a step until it succeeds: Apache Kafka's broker applies the controller's changes later."""
        mismatches: list[Mismatch] = []
        for _ in attempts(lambda: mismatches[-1], step_s=STEP_S):
            try:
                self._verbs[verb](*words)
                break
            except Mismatch as error:
                mismatches.append(error)

    def _wait(self, seconds: str) -> None:
        pause(float(seconds))


class _Pending(NamedTuple):
    """A request whose response has not been read."""

    correlation_id: int
    api: Api | None
    """None for raw bytes, whose response names its API."""
    version: int


class WrittenRequests:
    """Steps that write out a request (`>`, `>>`, `> frame`) or the response to it (`<`)."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._pending: defaultdict[str, deque[_Pending]] = defaultdict(deque)
        """Name of a connection -> its requests without a response, in the order in which they were sent."""
        self._repeated: tuple[int, Any] | None = None
        """Version and message of a `>>` step, until the `<` step that says when to stop."""

    def check_all_answered(self) -> None:
        assert not any(self._pending.values()), "a request's answer is not among the steps"

    def send(self, arrow: str, name: str, version_text: str | None, text: str) -> None:
        """Send a request. A `>>` request is only kept, for `receive` to repeat."""
        body = resolve(read_yaml(text), self._context.variables)
        if name == "frame":
            self._send_frame(**body)
            return
        api = API_BY_NAME[name]
        version = int(version_text) if version_text else self._context.version_of(api)
        message = add_topic_ids(build(api.request, body), self._context.variables)
        if arrow == ">>":
            self._repeated = version, message
        else:
            correlation_id = self._context.client.send(message, version)
            self._pending[self._context.connection].append(_Pending(correlation_id, api, version))

    def _send_frame(
        self, api_key: int, api_version: int, body: str = "", client_id: str | None = "raw", tags: str = "",
        size: int | None = None,
    ) -> None:  # fmt: skip
        correlation_id = 7
        name = b"" if client_id is None else client_id.encode()
        name_bytes = -1 if client_id is None else len(name)
        head = struct.pack(">hhih", api_key, api_version, correlation_id, name_bytes)
        frame = head + name + bytes.fromhex(tags) + bytes.fromhex(body)
        self._context.client.socket.sendall(struct.pack(">i", len(frame) if size is None else size) + frame)
        self._pending[self._context.connection].append(_Pending(correlation_id, None, api_version))

    def receive(self, only_broker: str, name: str | None, version_text: str | None, text: str) -> None:
        """Read the response to the connection's oldest request. Raise Mismatch if it is not as written."""
        if only_broker and only_broker != self._context.broker.name:
            return
        if self._repeated is not None:
            self._repeat(read_yaml(text), *self._repeated)
            return
        pending = self._pending[self._context.connection].popleft()
        if text == "nothing":
            return
        frame = self._context.client.read_frame()
        if text == "closed":
            assert frame is None, "the broker answered and kept the connection"
            self._context.drop_connection()
            return
        assert frame is not None, "the broker ended the connection"
        api = API_BY_NAME[name] if name else pending.api
        version = int(version_text) if version_text else pending.version
        assert api is not None
        correlation_id, response = decode_response(api.response, version, frame)
        assert correlation_id == pending.correlation_id, f"an answer to another request: {response}"
        match(read_yaml(text), response, version, self._context.variables)

    def _repeat(self, expected: Any, version: int, message: Any) -> None:
        mismatches: list[Mismatch] = []
        for _ in attempts(lambda: mismatches[-1], step_s=STEP_S):
            # A mismatch may have bound variables to a response that is not the final one.
            variables = dict(self._context.variables)
            try:
                match(expected, self._context.client.ask(message, version), version, variables)
                break
            except Mismatch as error:
                mismatches.append(error)
        self._context.variables.update(variables)
        self._repeated = None
