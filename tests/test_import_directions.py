"""Walks every import of the project and fails on one that points the wrong way."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EASYRL = "easyrl."

# Room → what of ours its files may import besides each other, at module level or inside a function,
# names below ``easyrl.``; a file belongs to the longest row that fits. From the leaves upwards.
MAY_IMPORT = {
    "schema": "",
    "config": "",
    "completion_check": "schema config",
    "convert": "config",
    "hub": "config runtime.run_files",
    "metrics.event_log": "",
    "runtime.whole_files": "",
    "timeline": "runtime.whole_files",
    "runtime.allocator": "",
    "runtime.busy_time": "",
    "runtime.seeding": "",
    "runtime.numerics": "",
    "runtime.durable_files": "",
    "runtime.frames": "",
    "runtime.garbage": "",
    "runtime.loop_thread": "",
    "runtime.machine": "",
    "runtime.device_time": "",
    "runtime.model_spans": "runtime.device_time",
    "runtime.printable": "",
    "runtime.process_guard": "",
    "runtime.phase_memory": "",
    "runtime.ranks": "",
    "runtime.schedule": "",
    "runtime.shared_cores": "runtime.contention runtime.machine",
    "runtime.small_files": "",
    "runtime.startup_signals": "",
    "runtime.streams": "",
    "runtime.uncaught": "",
    "runtime.user_code": "schema",
    "runtime.workers": "runtime.frames runtime.process_guard",
    "kernels.attention": "",
    "kernels.layers": "",
    "kernels.logprobs": "",
    # prompts in, micro-batches out
    "dataloaders.prompts": "schema config",
    "dataloaders.producer": "schema metrics.event_log runtime.loop_thread runtime.printable"
    " timeline.spans",
    "episodes.branches": "schema",
    "dataloaders.packing": "schema episodes.branches",
    "dataloaders.supervised": "schema config dataloaders.prompts dataloaders.producer",
    # host.py and kinds/ also run in another Python: they import nothing of ours, or only there
    "environments": "schema config rewards.functions runtime.process_guard runtime.user_code"
    " runtime.workers.child_process runtime.workers.supervised_child",
    "rewards": "schema config runtime.busy_time runtime.user_code runtime.workers.worker_pool"
    " inference_client.api_keys",
    # the endpoints
    "inference_client": "schema config completion_check runtime.frames",
    "inference_client.fetching": "schema config completion_check runtime.frames runtime.garbage"
    " runtime.machine"
    " runtime.workers inference_client.api_keys inference_client.client inference_client.errors"
    " inference_client.adapter_names inference_client.responses inference_client.sample_stream",
    "inference_client.pool": "schema config runtime.small_files timeline.spans"
    " inference_client.api_keys"
    " inference_client.adapter_names inference_client.client inference_client.errors",
    "inference_client.vllm_plugin": "",
    "inference_client.transfer": "runtime.small_files inference_client.api_keys"
    " inference_client.vllm_plugin",
    "inference_client.servers.managed": "config runtime.machine runtime.process_guard"
    " inference_client.api_keys inference_client.lora_ranks"
    " inference_client.vllm_plugin.easyrl_vllm.access",
    "inference_client.servers.embedded": "schema hub kernels.attention.partial_attention"
    " runtime.garbage runtime.machine runtime.numerics runtime.shared_cores"
    " inference_client.sample_stream inference_client.transfer inference_client.vllm_plugin",
    # a process of its own between environments and the trainer's
    "gateway": "schema config completion_check runtime.frames runtime.garbage runtime.machine"
    " runtime.workers.child_process inference_client.adapter_names inference_client.api_keys"
    " inference_client.errors inference_client.fetching",
    "episodes": "schema config metrics.event_log runtime.workers timeline.spans"
    " environments.failures gateway.messages gateway.process gateway.turn_sampling"
    " inference_client.errors inference_client.fetching inference_client.pool.asked_ahead",
    # the model that is trained
    "recipes": "schema config engines.base kernels.logprobs.linear_logprob"
    " kernels.logprobs.token_losses rewards.overlong runtime.user_code",
    "models": "schema config engines.base kernels recipes runtime.model_spans runtime.numerics"
    " runtime.user_code",
    "engines.base": "schema runtime.model_spans runtime.ranks",
    "engines": "schema config runtime.allocator runtime.durable_files runtime.interfaces"
    " runtime.gloo_wait runtime.lost_process runtime.rank_store runtime.shared_folder"
    " runtime.model_spans runtime.ranks recipes kernels.attention.segment_layout"
    " models.critic models.loading models.lora models.offload models.output_head"
    " models.policy_model models.teacher models.teacher_loading models.tri_model",
    "engines.megatron": "schema config engines.base engines.deepspeed engines.perturbation"
    " engines.process_group engines.state_file recipes runtime.model_spans runtime.ranks"
    " kernels.attention"
    " kernels.logprobs models.activation_checkpointing models.loading models.policy_model"
    " models.supported models.weight_files",
    "memory_plan": "config dataloaders.packing.cost"
    " engines.deepspeed.config engines.deepspeed.memory"
    " engines.megatron.layout engines.megatron.splittable engines.megatron.weights"
    " kernels.logprobs models.supported recipes",
    # the run
    "samples": "schema engines.base episodes.branches gateway.tool_parsers metrics.batch_metrics"
    " runtime.schedule runtime.whole_files",
    "metrics": "schema config engines.base runtime.collectives runtime.durable_files"
    " runtime.streams samples.choice",
    "runtime": "schema config metrics.event_log",
    "ledger.format": "",
    "ledger.exclusions": "schema",
    "ledger.journal": "ledger.format ledger.exclusions schema config completion_check"
    " metrics.event_log runtime.durable_files runtime.ranks"
    " runtime.rank_coordination dataloaders.producer dataloaders.prompts.dataset",
    "ledger.checkpoints": "ledger.format schema config engines.base engines.state_file"
    " metrics.event_log"
    " runtime.collectives runtime.durable_files models.lora inference_client.transfer.artifact",
    "ledger.certificate": "ledger.format schema runtime.durable_files metrics.logprob_agreement"
    " dataloaders.producer.membership",
    "ledger.account": "schema engines.base metrics.batch_metrics metrics.logprob_agreement"
    " ledger.certificate.records",
    "ledger": "schema completion_check metrics.trackers runtime.run_files runtime.ranks"
    " runtime.collectives runtime.schedule dataloaders.producer.group_stream"
    " dataloaders.prompts.dataset",
    "lab": "schema ledger.recorded_run runtime.determinism",
    "simulation.setting": "",
    "simulation.pipeline": "simulation.setting",
    "simulation.calibrate": "simulation.setting timeline",
    "simulation.replay": "simulation.calibrate simulation.pipeline simulation.setting timeline",
    "simulation.advice": "config simulation.calibrate simulation.pipeline simulation.replay"
    " simulation.setting timeline",
    "simulation.run_setting": "config metrics.trackers runtime.run_files simulation.calibrate"
    " simulation.replay simulation.setting timeline",
    "simulation.stated_rates": "config simulation.setting",
    "simulation": "config memory_plan",
    "report": "config metrics.names metrics.trackers runtime.run_files runtime.whole_files samples"
    " simulation.advice timeline",
    "weight_sync": "schema config engines.base runtime.collectives runtime.loop_thread"
    " runtime.interfaces runtime.machine runtime.shared_cores runtime.stopping"
    " inference_client",
    "trainer": "",
    "trainer.row_split": "schema",
    "trainer.model_outputs": "schema engines.base episodes.branches trainer.row_split",
    "trainer.look_ahead": "schema metrics.event_log trainer.model_outputs",
    "trainer.group_preparation": "schema metrics.group_counts runtime.phase_clock",
    "trainer.accumulation": "schema metrics.event_log metrics.batch_metrics"
    " metrics.logprob_agreement engines.base"
    " runtime.collectives runtime.device_time runtime.phase_clock runtime.shared_cores"
    " runtime.stopping samples.choice trainer.group_preparation trainer.look_ahead"
    " trainer.model_outputs",
    "trainer.loop": "schema metrics.batch_metrics metrics.reporter ledger.certificate.records"
    " ledger.account ledger.exclusions runtime.device_time runtime.phase_clock"
    " trainer.accumulation trainer.parts",
    "trainer.parts": "schema metrics.batch_metrics ledger.certificate.records trainer.accumulation",
    "trainer.held_out_loss": "schema config engines.base metrics.batch_metrics runtime.collectives"
    " runtime.schedule runtime.stopping trainer.accumulation",
    "trainer.alarm_actions": "schema config metrics.alarms runtime.collectives trainer.parts",
    "trainer.held_out_set": "schema config runtime.collectives ledger.exclusions",
    "trainer.evaluation": "schema config runtime.schedule runtime.collectives runtime.stopping"
    " trainer.held_out_set",
    # what puts the rooms together, and what a user calls
    # what a run and easyrl doctor look at before; the wiring says in which order
    "doctor": "schema config completion_check dataloaders.prompts.sources engines.base"
    " engines.deepspeed.memory engines.weight_names inference_client memory_plan"
    " metrics.logprob_agreement models.loading models.policy_model models.supported"
    " models.weight_files rewards.scorer runtime.user_code"
    " weight_sync.challenge weight_sync.store",
    "build": "schema config completion_check dataloaders doctor engines environments episodes"
    " gateway.errors gateway.messages gateway.rendering gateway.tool_parsers inference_client"
    " kernels.attention lab"
    " ledger memory_plan metrics models recipes rewards runtime samples simulation.advice"
    " timeline trainer weight_sync",
    "arguments": "",
    "arguments.reference": "__main__ arguments commands.replay"
    " inference_client.servers.embedded.server",
    "train": "schema config arguments hub build engines.base ledger.checkpoints metrics recipes"
    " runtime",
    "api": "schema config hub train runtime.machine runtime.uncaught rewards.given",
    "first_config": "schema config hub.models dataloaders.prompts.records demo.prepared"
    " rewards.functions",
    "one_machine.launched_trainer": "runtime.machine runtime.process_guard",
    "one_machine": "config hub train demo.prepared runtime.startup_signals"
    " inference_client.servers.managed.launch",
    "commands": "schema config arguments convert doctor.finding first_config hub one_machine train"
    " build lab ledger memory_plan recipes report runtime samples simulation timeline"
    " inference_client.pool.endpoint_list inference_client.servers.embedded.server",
    "__main__": "arguments commands runtime.startup_signals",
    "demo.prepared": "demo",
    "demo": "config timeline one_machine.launched_trainer recipes metrics.trackers runtime.machine"
    " runtime.run_files runtime.shared_cores runtime.run_folder"
    " inference_client.api_keys inference_client.servers.managed",
    "__init__": "api",
}

HEAVY = {"torch", "deepspeed", "transformers", "math_verify", "pyarrow"}
# Imported where it has to be fast: by worker processes, which import the main module again, and by
# a command that shows its help.
LIGHT = """
    __init__ __main__ schema config config.machine config.file hub hub.models train rewards.worker
    commands.train commands.serve commands.evaluate commands.endpoints commands.verify
    commands.recipes commands.replay commands.sft commands.dpo commands.plan_memory
    commands.init commands.up one_machine.run
    commands.doctor commands.diff commands.lab commands.samples commands.convert
    samples.selection samples.show
    runtime.frames runtime.notices runtime.signals runtime.stacks runtime.stopping
    runtime.watchdog runtime.workers.child_process runtime.workers.worker_pool
    runtime.workers.worker_process
    environments.host environments.hosts environments.client environments.kinds.coroutine
    environments.kinds.openenv environments.kinds.tools environments.kinds.verifiers
    gateway.messages gateway.process gateway.server
    completion_check inference_client.answers inference_client.client inference_client.responses
    inference_client.fetching.fetcher inference_client.fetching.fetcher_pool
    inference_client.fetching.fetcher_process inference_client.fetching.messages
    inference_client.fetching.single_requests
    inference_client.fetching.streamed_requests inference_client.fetching.suspects
    inference_client.sample_stream
""".split()

PLAIN = {
    "__future__",
    "collections",
    "contextlib",
    "dataclasses",
    "functools",
    "importlib",
    "inspect",
    "itertools",
    "logging",
    "math",
    "types",
    "typing",
    "weakref",
}
# modules that are imported only where their package is: a kernel is compiled from module level
LAZY_KERNELS = {"kernels.logprobs.triton_logprob": {"triton"}}


def module_files() -> dict[str, Path]:
    """Every module's file, by its name below ``easyrl.``."""
    files = {}
    for folder in ("easyrl", "dataloaders", "inference_client", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            below = ROOT / "easyrl" if folder == "easyrl" else ROOT
            name = ".".join(path.relative_to(below).with_suffix("").parts)
            files[name.removesuffix(".__init__")] = path
    return files


FILES = module_files()


def imported(name: str, *, module_level_only: bool = False) -> set[str]:
    """Full names of all that a module's file imports, of ours and of others."""
    tree = ast.parse(FILES[name].read_text())
    found: set[str] = set()
    for node in tree.body if module_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:  # the plugin has another name inside vLLM and stays in its own folder
                assert within(name, "inference_client.vllm_plugin") and node.level == 1, name
                is_package = FILES[name].name == "__init__.py"
                package = name if is_package else name.rpartition(".")[0]
                module = f"{EASYRL}{package}.{module}".rstrip(".")
            found |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    return found


def imported_modules(name: str, *, module_level_only: bool = False) -> set[str]:
    """Modules of ours that a module's file imports, packages that it names included."""
    found = set()
    for full_name in imported(name, module_level_only=module_level_only):
        if full_name.startswith(EASYRL):
            module = full_name.removeprefix(EASYRL)
            while module and module not in FILES:  # a name inside a module
                module = module.rpartition(".")[0]
            found.add(module)
    return found - {"", name}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def room_of(name: str) -> str:
    return max((room for room in MAY_IMPORT if within(name, room)), key=len, default="")


def wrong_imports(name: str, modules: set[str]) -> set[str]:
    """Those of ``modules`` that the file ``name`` must not import."""
    room = room_of(name)
    allowed = [room, *MAY_IMPORT[room].split()]
    return {module for module in modules if not any(within(module, ok) for ok in allowed)}


def a_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Files that import each other in a circle, the first again at the end; empty without one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def heavy_imports(name: str) -> set[tuple[str, str]]:
    """Heavy packages that are imported with a module, and by which of ours."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            parts = module.split(".")
            packages = {".".join(parts[:n]) for n in range(1, len(parts))} & set(FILES)
            waiting += packages | imported_modules(module, module_level_only=True)
    return {
        (package, module)
        for module in seen
        for package in HEAVY & top_level(imported(module, module_level_only=True))
    }


def top_level(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def test_every_file_belongs_to_a_room_and_every_room_has_files():
    assert {room_of(name) for name in FILES} == set(MAY_IMPORT)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_it_may(room):
    for name in FILES:
        if room_of(name) == room:
            wrong = wrong_imports(name, imported_modules(name))
            assert not wrong, f"{name} imports {sorted(wrong)}"


@pytest.mark.parametrize(
    "name, module",
    [
        ("schema", "config"),
        ("config.run", "schema"),
        ("kernels.attention.merged_attention", "schema"),
        ("dataloaders.packing.groups", "trainer.loop"),
        ("dataloaders.producer.group_stream", "inference_client.client"),
        ("trainer.loop", "dataloaders.packing.groups"),
        ("trainer.loop", "inference_client.pool.endpoint_pool"),
        ("trainer.loop", "engines.deepspeed.engine"),
        ("weight_sync.publish", "engines.deepspeed.engine"),
        ("recipes.losses", "models.tri_model"),
        ("ledger.journal.batch", "ledger.certificate.writer"),
        ("train", "trainer.loop"),
    ],
)
def test_an_import_against_the_direction_is_refused(name, module):
    assert {name, module} <= set(FILES)
    assert wrong_imports(name, {module}) == {module}


def test_no_two_files_import_each_other():
    """Round any number of corners; also where an import is for types or inside a function."""
    assert a_cycle({name: imported_modules(name) for name in FILES}) == []


def test_a_cycle_is_found():
    graph = {name: imported_modules(name) for name in FILES}
    assert "config" in imported_modules("config.file")
    graph["config"] = graph["config"] | {"config.file"}
    assert set(a_cycle(graph)) == {"config", "config.file"}


def test_only_the_wiring_knows_all_rooms():
    rooms = ("dataloaders", "inference_client", "engines.deepspeed")
    for name in FILES:
        known = {r for r in rooms for module in imported_modules(name) if within(module, r)}
        assert len(known) < len(rooms) or within(name, "build"), f"{name} imports {sorted(known)}"


def test_kernels_import_only_torch_at_module_level():
    for name in FILES:
        if within(name, "kernels"):
            top = top_level(imported(name, module_level_only=True))
            of_backend = LAZY_KERNELS.get(name, set())
            assert top <= {"torch", "easyrl"} | PLAIN | of_backend, (name, top)


@pytest.mark.parametrize("name", LIGHT)
def test_what_has_to_be_light_imports_nothing_heavy(name):
    assert heavy_imports(name) == set()


def test_who_only_reads_a_run_does_not_load_deepspeed():
    """It looks for devices when it is imported, and says on the console what it found."""
    for name in ("build.verify", "report.collect", "report.page", "build.tokenizer"):
        assert {module for package, module in heavy_imports(name) if package == "deepspeed"} == (
            set()
        )


def test_a_heavy_import_is_found_behind_others():
    assert ("torch", "engines.deepspeed.engine") in heavy_imports("build.replay")
