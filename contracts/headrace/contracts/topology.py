"""The streams, buckets and durable consumers of the mesh: one table, from which everything is provisioned.

Reasons for the settings stand beside them; the facts behind them were tried on nats-server 2.15.
"""

from __future__ import annotations

from headrace.contracts.messages import FunctionSpec
from headrace.contracts.names import Lane
from headrace.contracts.specs import ConsumerSpec, StreamSpec, bucket
from headrace.contracts.subjects import Subjects

GIB = 1 << 30
MIN_SERVER = (2, 15, 1)
SUSPECTS_KEPT_S = 6 * 3_600.0
"""How long a crash is remembered: longer than any task waits for its next try, short enough to need no care."""
STATES_KEPT = 4
"""Committed states of one agent that are kept: the last counts, those before it are for looking."""
REPLIES_KEPT_NS = 24 * 3_600 * 1_000_000_000
"""How long a late answer can be fetched."""


class Topology:
    """Names and specifications of every stream and consumer under one prefix.

    Stream names carry the prefix too (`HR_TASKS`), so that meshes with other prefixes stand apart.
    """

    def __init__(
        self,
        subjects: Subjects | None = None,
        *,
        ack_wait_s: float = 30.0,
        max_bytes: int = -1,
        mailbox_messages: int = 10_000,
    ) -> None:
        self.subjects = subjects or Subjects()
        self.ack_wait_s = ack_wait_s
        self.max_bytes = max_bytes
        self.mailbox_messages = mailbox_messages
        p = self.subjects.prefix.upper().replace("-", "_")
        self.tasks, self.results, self.jobs, self.dead = (
            f"{p}_TASKS",
            f"{p}_RESULTS",
            f"{p}_JOBS",
            f"{p}_DEAD",
        )
        self.calls, self.ledger, self.evidence, self.replies = (
            f"{p}_CALLS",
            f"{p}_LEDGER",
            f"{p}_EVIDENCE",
            f"{p}_REPLIES",
        )
        self.gateways_bucket = f"{p}_gateways"
        self.functions_bucket, self.workers_bucket = f"{p}_functions", f"{p}_workers"
        self.blobs_bucket = f"{p}_blobs"
        self.blobs = f"OBJ_{self.blobs_bucket}"
        self.suspects_bucket = f"{p}_suspects"
        self.mail, self.agents, self.capture = f"{p}_MAIL", f"{p}_AGENTS", f"{p}_CAPTURE"
        self.cards_bucket, self.presence_bucket = f"{p}_cards", f"{p}_presence"
        self.pipelines_bucket = f"{p}_pipelines"

    def streams(self) -> list[StreamSpec]:
        """Every stream, buckets included."""
        return [*self.task_streams(), *self.governed_streams(), *self.agent_streams()]

    def task_streams(self) -> list[StreamSpec]:
        """The streams of the task path."""
        p = self.subjects.prefix
        return [
            StreamSpec(
                name=self.tasks,
                subjects=[f"{p}.tasks.>"],
                retention="workqueue",
                allow_atomic=True,
                allow_direct=True,
                max_bytes=self.max_bytes,
                description="waiting and leased work; a full queue refuses",
            ),
            StreamSpec(
                name=self.results,
                subjects=[f"{p}.results.>"],
                retention="workqueue",
                allow_atomic=True,
                allow_direct=True,
                max_bytes=self.max_bytes,
                description="stored results that are not yet landed",
            ),
            StreamSpec(
                name=self.jobs,
                subjects=[f"{p}.jobs.>"],
                retention="limits",
                allow_direct=True,
                description="opened, sealed, cancelled, completed: the life of each job",
            ),
            StreamSpec(
                name=self.dead,
                subjects=[f"{p}.dead.>"],
                retention="limits",
                allow_direct=True,
                description="messages that no consumer could take, whole",
            ),
            # An object store as `nats object` knows it. Batches store an object whole or not at all.
            StreamSpec(
                name=self.blobs,
                subjects=[f"$O.{self.blobs_bucket}.C.>", f"$O.{self.blobs_bucket}.M.>"],
                retention="limits",
                allow_atomic=True,
                allow_direct=True,
                allow_rollup_hdrs=True,
                max_bytes=self.max_bytes,
                description="prompts and results that are too large for a message",
            ),
            bucket(self.functions_bucket, "registered functions"),
            bucket(self.workers_bucket, "reports of running workers", max_age_s=15.0),
            bucket(self.pipelines_bucket, "pipelines: their stages and what feeds each"),
            bucket(
                self.suspects_bucket,
                "tasks that were in an engine when it died, and last errors",
                max_age_s=SUSPECTS_KEPT_S,
                allow_atomic=True,
            ),
        ]

    def governed_streams(self) -> list[StreamSpec]:
        """The streams of governed calls: waiting calls, the ledger, evidence, late answers."""
        p = self.subjects.prefix
        return [
            StreamSpec(
                name=self.calls,
                subjects=[f"{p}.calls.>"],
                retention="workqueue",
                allow_atomic=True,
                allow_direct=True,
                max_bytes=self.max_bytes,
                description="governed calls that wait for a gateway; acked once terminal or in doubt",
            ),
            StreamSpec(
                name=self.ledger,
                subjects=[f"{p}.ledger.>"],
                retention="limits",
                allow_atomic=True,
                allow_direct=True,
                deny_delete=True,
                deny_purge=True,
                description="records of governed calls and heads of budgets: append only",
            ),
            StreamSpec(
                name=self.evidence,
                subjects=[f"{p}.evidence.>"],
                retention="limits",
                allow_direct=True,
                deny_delete=True,
                deny_purge=True,
                description="what was learned of calls beside their records",
            ),
            StreamSpec(
                name=self.replies,
                subjects=[f"{p}.replies.>"],
                retention="limits",
                allow_direct=True,
                max_msgs_per_subject=1,
                max_age=REPLIES_KEPT_NS,
                description="answers that came later than their asker waited",
            ),
            bucket(self.gateways_bucket, "the lives of gateways"),
        ]

    def agent_streams(self) -> list[StreamSpec]:
        """The streams of agents: mailboxes, committed states, what agents did; their cards and who is there."""
        p = self.subjects.prefix
        return [
            # A full mailbox refuses, and the others go on: one subject for each (agent, lane, sender), so that nobody
            # takes another sender's room.
            StreamSpec(
                name=self.mail,
                subjects=[f"{p}.mail.>"],
                retention="workqueue",
                allow_atomic=True,
                allow_direct=True,
                max_bytes=self.max_bytes,
                max_msgs_per_subject=self.mailbox_messages,
                discard_new_per_subject=True,
                description="mailboxes of agents; a full one refuses",
            ),
            StreamSpec(
                name=self.agents,
                subjects=[f"{p}.agents.>"],
                retention="limits",
                allow_atomic=True,
                allow_direct=True,
                max_msgs_per_subject=STATES_KEPT,
                description="committed states of agents with what each sends out next",
            ),
            StreamSpec(
                name=self.capture,
                subjects=[f"{p}.capture.>"],
                retention="limits",
                allow_direct=True,
                max_bytes=self.max_bytes,
                description="what agents did; may trail",
            ),
            bucket(self.cards_bucket, "cards of agents: what each does and takes"),
            bucket(self.presence_bucket, "which agents are running, for display", max_age_s=15.0),
        ]

    def mail_consumer(self, agent: str, lane: str) -> ConsumerSpec:
        """One lane of an agent's mailbox. One message at a time: so a sender's order holds under redelivery."""
        return ConsumerSpec(
            stream=self.mail,
            durable=f"{agent}-{lane}",
            filter_subject=self.subjects.mail_lane(agent, lane),
            ack_wait_s=self.ack_wait_s,
            max_ack_pending=1 if lane == "work" else 1_000,
        )

    def capture_consumer(self) -> ConsumerSpec:
        """What agents did, for the data plane."""
        return ConsumerSpec(
            stream=self.capture,
            durable="completion",
            filter_subject=f"{self.subjects.prefix}.capture.>",
            ack_wait_s=self.ack_wait_s,
            max_ack_pending=20_000,
        )

    def ledger_consumer(self) -> ConsumerSpec:
        """The ledger's records, for the projection."""
        return ConsumerSpec(
            stream=self.ledger,
            durable="completion",
            filter_subject=f"{self.subjects.prefix}.ledger.>",
            ack_wait_s=self.ack_wait_s,
            max_ack_pending=20_000,
        )

    def calls_consumer(self) -> ConsumerSpec:
        """Governed calls, shared by all gateways. Calls that wait for approval count as pending."""
        return ConsumerSpec(
            stream=self.calls,
            durable="gateway",
            filter_subject=f"{self.subjects.prefix}.calls.>",
            ack_wait_s=self.ack_wait_s,
            max_ack_pending=100_000,
        )

    def task_consumer(
        self, function: str, lane: Lane | str, shape: int, *, max_ack_pending: int = 20_000
    ) -> ConsumerSpec:
        """The consumer of one (function, lane, shape)."""
        return ConsumerSpec(
            stream=self.tasks,
            durable=f"{function}-{Lane(lane).value}-t{shape}",
            filter_subject=self.subjects.tasks_of_shape(function, lane, shape),
            ack_wait_s=self.ack_wait_s,
            max_ack_pending=max_ack_pending,
        )

    def function_consumers(self, spec: FunctionSpec) -> list[ConsumerSpec]:
        """The consumers of all lanes and shapes of a registered function."""
        return [self.task_consumer(spec.name, lane, shape) for lane in spec.lanes for shape in spec.shapes()]

    def completion_consumers(self) -> list[ConsumerSpec]:
        """What the completion service pulls from."""
        return [
            self.results_consumer(),
            self.jobs_consumer(),
            self.dead_consumer(),
            self.ledger_consumer(),
            self.capture_consumer(),
        ]

    def gateway_consumers(self) -> list[ConsumerSpec]:
        """What gateways pull from, all of them together."""
        return [self.calls_consumer(), self.call_results_consumer()]

    def call_results_consumer(self) -> ConsumerSpec:
        """Results of calls that ran on our own workers."""
        return ConsumerSpec(
            stream=self.results,
            durable="gateway",
            filter_subject=self.subjects.results_of_sink("call"),
            ack_wait_s=self.ack_wait_s,
            max_ack_pending=20_000,
        )

    def results_consumer(self) -> ConsumerSpec:
        """Results of jobs, for landing."""
        return ConsumerSpec(
            stream=self.results,
            durable="completion",
            filter_subject=self.subjects.results_of_sink("job"),
            ack_wait_s=self.ack_wait_s,
            max_ack_pending=50_000,
        )

    def jobs_consumer(self) -> ConsumerSpec:
        """Job events, for the states of jobs."""
        return ConsumerSpec(
            stream=self.jobs,
            durable="completion",
            filter_subject=self.subjects.all_jobs(),
            ack_wait_s=self.ack_wait_s,
        )

    def dead_consumer(self) -> ConsumerSpec:
        """Dead letters, for the table `dead`."""
        return ConsumerSpec(
            stream=self.dead,
            durable="completion",
            filter_subject=f"{self.subjects.prefix}.dead.>",
            ack_wait_s=self.ack_wait_s,
        )
