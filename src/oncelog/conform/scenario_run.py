"""The code that runs one scenario on one broker, over real sockets."""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from oncelog.conform.context import Context, Verbs
from oncelog.conform.deadline import Deadline
from oncelog.conform.raw_connection import NoAnswer, Unsupported
from oncelog.conform.record_steps import RecordSteps
from oncelog.conform.scenario_reader import REQUEST, RESPONSE, Scenario
from oncelog.conform.target import Target
from oncelog.conform.transaction_steps import TransactionSteps
from oncelog.conform.values import Mismatch, ScenarioError, add_topic_ids, build, match, read_yaml, resolve
from oncelog.wire.frames import decode_response
from oncelog.wire.messages import API_BY_NAME, Api


class StepFailed(Exception):
    """The response to a step was not as expected. `cause` describes the response."""

    def __init__(self, scenario: Scenario, step: str, cause: Exception) -> None:
        super().__init__(f"{scenario.file}.md, {scenario.title}:\n{step}\n{cause}")
        self.step, self.cause = step, cause


class Steps(Protocol):
    """An object with steps of one subject. `verbs` maps the first word of a step to its function."""

    verbs: Verbs


class Run:
    """One run of a scenario. It carries out the steps in order; the first word of a step selects the method.

    `more_steps` are constructors of further `Steps`, for steps that only tests have.
    """

    def __init__(
        self,
        scenario: Scenario,
        version: int | None,
        target: Target,
        deadline: Deadline,
        more_steps: Iterable[Callable[[Context], Steps]] = (),
    ) -> None:
        self._scenario = scenario
        self._context = context = Context(scenario, version, target, deadline)
        self._exchange = WrittenRequests(context)
        self._verbs: dict[str, Callable[..., None]] = {
            "on": self._on,
            "eventually": self._eventually,
            "wait": self._wait,
        }
        all_steps: list[Callable[[Context], Steps]] = [RecordSteps, TransactionSteps, *more_steps]
        for make in all_steps:
            self._verbs |= make(context).verbs

    def run(self) -> None:
        """Carry out all steps.

        Raises StepFailed, and Unsupported if the broker lacks a version or feature that the scenario needs.
        """
        step = "(names and versions)"
        try:
            self._context.prepare()
            for step in self._scenario.steps:
                self._run_step(step)
            self._exchange.check_all_answered()
        except Unsupported:
            raise
        except OSError as error:
            raise StepFailed(self._scenario, step, NoAnswer(str(error))) from error
        except Exception as error:
            # Treat any other exception as a mismatch: a step fails to read some wrong responses, for example
            # if a list is empty or a text is not UTF-8.
            is_known = isinstance(error, (Mismatch, ScenarioError))
            cause = error if is_known else Mismatch(f"{type(error).__name__}: {error}")
            raise StepFailed(self._scenario, step, cause) from error
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
        """Repeat a step until it succeeds, because Apache Kafka's broker applies the controller's changes
        with a delay.
        """
        mismatches: list[Mismatch] = []
        for _ in self._context.deadline.attempts(lambda: mismatches[-1]):
            try:
                self._verbs[verb](*words)
                break
            except NoAnswer:
                raise
            except Mismatch as error:
                mismatches[:] = [error]

    def _wait(self, seconds: str) -> None:
        self._context.deadline.pause(float(seconds))


class _Pending(NamedTuple):
    """A request whose response has not been read."""

    correlation_id: int
    api: Api | None
    """The request's API; None for raw bytes, for which the `<` step names the API of the response."""
    version: int


class WrittenRequests:
    """Steps that write out a request (`>`, `>>`, `> frame`) or the response to it (`<`)."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._pending: defaultdict[str, deque[_Pending]] = defaultdict(deque)
        """Name of a connection -> its requests without a response, in the order in which they were sent."""
        self._repeated: tuple[int, Any] | None = None
        """Version and message of the last `>>` step until its `<` step has run, else None.

        The message is sent again until the response that the `<` step expects has come.
        """

    def check_all_answered(self) -> None:
        """Raise ScenarioError if a request has no `<` step for its response."""
        if any(self._pending.values()):
            raise ScenarioError("a request's answer is not among the steps")

    def send(self, arrow: str, name: str, version_text: str | None, text: str) -> None:
        """Send a request. A `>>` request is not sent but stored, because `receive` sends it repeatedly."""
        body = resolve(read_yaml(text), self._context.variables)
        if name == "frame":
            self._send_frame(**body)
            return
        api = API_BY_NAME[name]
        if version_text:
            version = int(version_text)
            self._context.target.offer(self._context.client).check(api, version)
        else:
            version = self._context.version_of(api)
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
        self._context.client.write(struct.pack(">i", len(frame) if size is None else size) + frame)
        self._pending[self._context.connection].append(_Pending(correlation_id, None, api_version))

    def receive(self, only_broker: str, name: str | None, version_text: str | None, text: str) -> None:
        """Read the response to the connection's oldest request. Raise Mismatch if it is not as expected.
        After a `>>` request, repeat the request until the response is as expected.
        """
        if only_broker and only_broker != self._context.target.expects:
            return
        if self._repeated is not None:
            self._repeat(read_yaml(text), *self._repeated)
            return
        pending = self._pending[self._context.connection].popleft()
        if text == "nothing":
            return
        frame = self._context.client.read_frame()
        if text == "closed":
            if frame is not None:
                raise Mismatch("the broker answered and kept the connection", "closed", "an answer")
            self._context.drop_connection()
            return
        if frame is None:
            raise NoAnswer("the broker ended the connection", text, "the connection's end")
        api = API_BY_NAME[name] if name else pending.api
        version = int(version_text) if version_text else pending.version
        if api is None:
            raise ScenarioError("the response to a frame needs an API and a version")
        correlation_id, response = decode_response(api.response, version, frame)
        if correlation_id != pending.correlation_id:
            raise Mismatch(f"an answer to another request: {response}")
        match(read_yaml(text), response, version, self._context.variables)

    def _repeat(self, expected: Any, version: int, message: Any) -> None:
        mismatches: list[Mismatch] = []
        for _ in self._context.deadline.attempts(lambda: mismatches[-1]):
            # Match on a copy of the variables: a failed match may have set some of them from a response that
            # is then discarded.
            variables = dict(self._context.variables)
            try:
                match(expected, self._context.client.ask(message, version), version, variables)
                break
            except NoAnswer:
                raise
            except Mismatch as error:
                mismatches[:] = [error]
        self._context.variables.update(variables)
        self._repeated = None
