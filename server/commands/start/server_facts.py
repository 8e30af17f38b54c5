"""What every process of a server knows, and what it makes of that: the service that answers, and
what the engine's processes are told."""

from __future__ import annotations

import dataclasses

import msgspec

from ess.clock import RealClock
from ess.engine.config import ProcessConfig
from ess.engine.process.messages import Launch
from ess.errors import BadInput
from ess.free_resources import memory_free
from ess.models.chat.reply import PlainParser
from ess.server.commands.start.files.checkpoint import Checkpoint, default_sampling
from ess.server.commands.start.files.words import Words, template_names
from ess.server.commands.start.settings import Resolved, Settings
from ess.server.commands.start.sizing import MemoryPlan, size_of
from ess.server.process.board import Board
from ess.server.process.link import EngineLink
from ess.server.process.pair.peers import Peers, Split
from ess.server.process.requests.kept_responses import KeptResponses
from ess.server.process.service import Limits, Service
from ess.server.process.text_child import Desk
from ess.server.process.texts import Texts
from ess.transfer.messages import Seal


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What every process of the server knows. `port` is where other workers connect, `layers` are
    those of each stage, if the engine has stages."""

    resolved: Resolved
    checkpoint: Checkpoint
    plan: MemoryPlan
    layers: tuple[tuple[int, int], ...] = ()
    port: int = 0


def make_service(told: ServerFacts, words: Words, *, link: EngineLink, board: Board) -> Service:
    resolved, checkpoint, plan = told.resolved, told.checkpoint, told.plan
    settings = resolved.settings
    link.calls.unread_max = size_of(settings.unread_bytes, of=memory_free())
    desk = Desk(
        model=checkpoint.path,
        length_max=plan.length_max,
        vocabulary=words.vocabulary,
        template=words.template,
        template_names=template_names(settings.default_chat_template_kwargs),
    )
    return Service(
        names=settings.names,
        model_type=checkpoint.config.family,
        architecture=checkpoint.architecture,
        tokenizer=words.tokenizer,
        texts=Texts(words.tokenizer, words.style, desk),
        style=words.style,
        is_marked=not isinstance(words.style.parser(thinking=False), PlainParser),
        eos_ids=checkpoint.eos_ids,
        vocabulary=words.vocabulary,
        token_capacity=plan.token_capacity,
        limits=Limits(
            running_max=settings.max_running,
            waiting_max=settings.max_waiting,
            length_max=plan.length_max,
            tokens_default=settings.default_max_tokens,
            keep_alive_s=settings.keep_alive_s,
            stall_s=settings.stall_s,
            body_max=size_of(settings.body_bytes, of=1 << 30),
            names=settings.hosts,
            tells_usage=settings.stream_usage,
        ),
        defaults=default_sampling(settings.default_sampling, checkpoint.defaults),
        link=link,
        board=board,
        clock=RealClock(),
        described=resolved.shown(),
        weight_bytes=plan.weight_bytes,
        compat=settings.compat,
        layers=told.layers if settings.role == "prefill" else (),
        split=split_of(settings, told.port, link),
        kept=kept_responses(settings),
    )


def kept_responses(settings: Settings) -> KeptResponses | None:
    """Where responses are kept: in one process, where every request can read them."""
    if not settings.keep_responses:
        return None
    for name, is_shared, each in (
        ("server_processes", settings.server_processes > 1, "process"),
        ("role", settings.role != "both", "worker"),
        ("dp_rank", settings.dp_rank >= 0, "rank"),
    ):
        if is_shared:
            raise BadInput(
                f"keep_responses is {settings.keep_responses}, and {name} is"
                f" {getattr(settings, name)}: each {each} would find its own responses alone"
            )
    return KeptResponses(size_of(settings.keep_responses, of=memory_free()))


def split_of(settings: Settings, port: int, link: EngineLink) -> Split:
    secret = settings.peer_secret.encode()
    return Split(
        role=settings.role,
        host=settings.host,
        port=port,
        has_own_port=bool(settings.bootstrap_port),
        peers=Peers(settings.peer_list, link, RealClock()) if settings.role == "decode" else None,
        seal=Seal(secret) if settings.role != "both" else None,
        allows_fake=settings.fake_prefill,
    )


def has_others(settings: Settings) -> bool:
    """Whether the engine meets processes that this command does not start."""
    return settings.role != "both" or settings.dp_size > 1 or settings.nnodes > 1


def launch_of(settings: Settings, checkpoint: Checkpoint, plan: MemoryPlan) -> Launch:
    told = {
        field.name: getattr(settings, field.name) for field in dataclasses.fields(ProcessConfig)
    }
    told["query_max"] = settings.max_running * settings.mtp
    told["graph_byte_max"] = plan.graph_bytes
    told["beside_bytes"] = plan.step_bytes
    return Launch(
        model=checkpoint.path,
        config=ProcessConfig(**told),
        length_max=plan.length_max,
        slot_bytes=plan.slot_bytes,
        host_bytes=plan.host_bytes,
        index_bytes=plan.index_bytes,
        secret=settings.peer_secret if has_others(settings) else "",
    )
