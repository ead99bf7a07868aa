"""Tests mirror the package: each module has a test file of its name, or the table here names the file that covers it."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
LONGEST_NAME = 79

# Module -> test file that covers it, where no test file has its name.
COVERED_ELSEWHERE: dict[str, str] = {
    "luffy.cli_help": "test_cli.py",
    "luffy.config.checks": "test_config.py",
    "luffy.config.knobs": "test_config.py",
    "luffy.config.parts": "test_registry.py",
    "luffy.config.recipes": "test_recipes.py",
    "luffy.yaml_text": "test_config.py",
    "luffy.compare.picture": "compare/test_pages.py",
    "luffy.compare.state": "compare/test_halving.py",
    "luffy.data.data_files": "data/test_data_sources.py",
    "luffy.data.prompts": "data/test_data_encode.py",
    "luffy.data.rows": "data/test_data_schemas.py",
    "luffy.data.traces": "data/test_chats.py",
    "luffy.distributed.follow": "distributed/test_launch.py",
    "luffy.distributed.group_engine": "train/test_exported_template.py",
    "luffy.distributed.ray_launch": "distributed/test_launch.py",
    "luffy.distributed.state": "distributed/test_sharded_checkpoint.py",
    "luffy.distributed.world": "distributed/test_ranks.py",
    "luffy.doctor.examination": "doctor/test_doctor_ranks.py",
    "luffy.doctor.machine": "doctor/test_doctor_findings.py",
    "luffy.doctor.network": "doctor/test_doctor_findings.py",
    "luffy.doctor.numerics": "doctor/test_doctor_findings.py",
    "luffy.dry_run.base_lines": "dry_run/test_base_model.py",
    "luffy.dry_run.check": "dry_run/test_dry_run.py",
    "luffy.dry_run.first_step": "dry_run/test_dry_run.py",
    "luffy.dry_run.lines": "dry_run/test_models.py",
    "luffy.dry_run.place": "dry_run/test_dry_run.py",
    "luffy.dry_run.times": "dry_run/test_dry_run.py",
    "luffy.dry_run.work": "dry_run/test_dry_run.py",
    "luffy.environments.protocol": "environments/test_tools.py",
    "luffy.errors": "test_cli.py",
    "luffy.evaluation.background_work": "evaluation/test_runner.py",
    "luffy.evaluation.compare": "evaluation/test_runner.py",
    "luffy.evaluation.engines": "evaluation/test_runner.py",
    "luffy.evaluation.plan": "evaluation/test_trained_with.py",
    "luffy.evaluation.responses": "evaluation/test_runner.py",
    "luffy.evaluation.results": "evaluation/test_runner.py",
    "luffy.evaluation.scoring": "evaluation/test_trained_with.py",
    "luffy.files": "run_folder/test_checkpoint.py",
    "luffy.generate": "test_cli.py",
    "luffy.guidance.row_hints": "guidance/test_built_in_gates.py",
    "luffy.guidance.trace_choice": "guidance/test_plan.py",
    "luffy.hub": "test_push.py",
    "luffy.kernels.draw": "kernels/test_kernels.py",
    "luffy.kernels.elementwise": "kernels/test_kernels.py",
    "luffy.kernels.gated": "kernels/test_kernels.py",
    "luffy.kernels.head": "kernels/test_kernels.py",
    "luffy.kernels.norm": "kernels/test_kernels.py",
    "luffy.kernels.paged": "kernels/test_kernels.py",
    "luffy.kernels.product": "kernels/test_kernels.py",
    "luffy.kernels.quantize": "kernels/test_kernels.py",
    "luffy.kernels.sums": "kernels/test_kernels.py",
    "luffy.learn.activations": "learn/test_offload.py",
    "luffy.learn.scorer": "learn/test_shared_prompts.py",
    "luffy.models.forward": "models/test_attention.py",
    "luffy.models.plain": "models/test_load.py",
    "luffy.models.products": "models/test_separate.py",
    "luffy.models.shapes": "dry_run/test_memory_table.py",
    "luffy.prepare.dataset_files": "prepare/test_prepare_traces.py",
    "luffy.prepare.endpoint": "prepare/test_prepare_traces.py",
    "luffy.prepare.journal": "prepare/test_prepare_traces.py",
    "luffy.prepare.prepare_cli": "prepare/test_prepare_check.py",
    "luffy.prepare.teachers": "prepare/test_prepare_traces.py",
    "luffy.progress": "test_cli.py",
    "luffy.report.charts": "report/test_report_html.py",
    "luffy.report.samples": "report/test_report_html.py",
    "luffy.report.tables": "report/test_report_html.py",
    "luffy.report.templates": "report/test_report_html.py",
    "luffy.rewards.format": "rewards/test_choice.py",
    "luffy.rewards.kinds": "rewards/test_verifier.py",
    "luffy.rewards.worker": "rewards/test_math_forms.py",
    "luffy.rollout.engine": "rollout/test_conformance.py",
    "luffy.rollout.native.decode_graphs": "rollout/test_round_graphs.py",
    "luffy.rollout.native.drafted_generation": "rollout/test_drafts.py",
    "luffy.rollout.native.drafting_decoder": "rollout/test_drafts.py",
    "luffy.rollout.native.paged_cache": "rollout/test_paged_generation.py",
    "luffy.rollout.native.paged_conversations": "rollout/test_slot_generation.py",
    "luffy.rollout.native.slot_cache": "rollout/test_speculative.py",
    "luffy.rollout.overrides.aligned": "rollout/test_served_model.py",
    "luffy.rollout.overrides.coupled": "rollout/test_served_model.py",
    "luffy.rollout.overrides.overriding_decoder": "rollout/test_speculative.py",
    "luffy.rollout.overrides.pair": "rollout/test_speculative.py",
    "luffy.rollout.overrides.propose": "rollout/test_speculative.py",
    "luffy.rollout.overrides.verify": "rollout/test_speculative.py",
    "luffy.rollout.vllm.colocated": "rollout/test_vllm.py",
    "luffy.rollout.vllm.guard": "rollout/test_serve.py",
    "luffy.rollout.vllm.http_client": "rollout/test_remote.py",
    "luffy.rollout.vllm.requests": "rollout/test_remote.py",
    "luffy.rollout.vllm.server_process": "rollout/test_serve.py",
    "luffy.rollout.vllm.transfer": "rollout/test_remote.py",
    "luffy.rollout.vllm.worker_extension": "rollout/test_policy_weights.py",
    "luffy.run_folder.background_saver": "distributed/test_sharded_checkpoint.py",
    "luffy.run_folder.changes": "train/test_resume.py",
    "luffy.run_folder.layout": "run_folder/test_runs.py",
    "luffy.run_folder.saved_state": "train/test_resume.py",
    "luffy.run_folder.trackers": "run_folder/test_recorder.py",
    "luffy.schema": "test_config.py",
    "luffy.seeds": "guidance/test_plan.py",
    "luffy.step.crediting": "step/test_prefetch.py",
    "luffy.step.draws": "train/test_loop.py",
    "luffy.step.gating": "step/test_sft_steps.py",
    "luffy.step.groups": "learn/test_credit.py",
    "luffy.step.play": "step/test_sft_steps.py",
    "luffy.step.rejection": "learn/test_teacher.py",
    "luffy.step.run_state": "train/test_loop.py",
    "luffy.step.sample_rows": "train/test_loop.py",
    "luffy.step.snapshot": "step/test_memory.py",
    "luffy.step.training_step": "train/test_loop.py",
    "luffy.train.held_out_traces": "step/test_tasks.py",
    "luffy.train.build": "train/test_loop.py",
    "luffy.train.held_out": "train/test_loop.py",
    "luffy.train.saving": "train/test_resume.py",
    "luffy.train.setup": "train/test_loop.py",
    "luffy.train.weights": "train/test_loop.py",
    "luffy.trainer": "train/test_loop.py",
    "luffy.types": "learn/test_packing.py",
    "luffy.view.live": "view/test_view_server.py",
    "luffy.view.site": "view/test_view_server.py",
}


def module_name(path: Path) -> str:
    """``luffy/a/b.py`` is ``luffy.a.b``, ``luffy/a/__init__.py`` is ``luffy.a``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_name(path): path for path in sorted((ROOT / "luffy").rglob("*.py"))}
MODULES = [name for name, path in FILES.items() if path.name not in ("__init__.py", "__main__.py", "_version.py")]
TEST_FILES = sorted(TESTS.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> frozenset[str]:
    """The modules of luffy that a file imports, anywhere in it, or names in a string to import them later."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return frozenset(found & FILES.keys())


@cache
def imports_of_test(path: Path) -> frozenset[str]:
    """The modules of luffy that a test file or one of its helper files imports."""
    helpers = {node.module for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom)}
    files = [path, *(file for file in TEST_FILES if file.stem in helpers and not file.stem.startswith("test_"))]
    return frozenset().union(*map(imports, files))


def reaches(test: Path, module: str) -> bool:
    """Whether a test imports the module, one of its users, or a user of these."""
    direct = imports_of_test(test)
    users = direct.union(*(imports(FILES[name]) for name in direct))
    return module in users or any(module in imports(FILES[name]) for name in users)


def own_test_file(module: str) -> Path | None:
    """``luffy.a.b.c`` is tested by tests/a/test_c.py or, if that name is taken, by tests/a/test_b_c.py."""
    _, *folders, name = module.split(".")
    folder = TESTS / folders[0] if folders else TESTS
    named = [f"test_{name}.py", *(f"test_{folder_name}_{name}.py" for folder_name in folders[-1:])]
    return next((folder / file for file in named if (folder / file).exists()), None)


def test_every_module_has_a_test_file():
    without = [name for name in MODULES if own_test_file(name) is None and name not in COVERED_ELSEWHERE]
    assert without == [], "add a test file of that name, or name the file that covers it in COVERED_ELSEWHERE"


def test_the_named_file_covers_the_module():
    """It imports the module, one of its users, or a user of these."""
    assert [name for name in COVERED_ELSEWHERE if name not in MODULES] == [], "there are no such modules"
    assert [name for name in COVERED_ELSEWHERE if own_test_file(name)] == [], "they have test files of their names"
    assert [name for name, file in COVERED_ELSEWHERE.items() if not reaches(TESTS / file, name)] == []


def functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in parsed(path).body if isinstance(node, ast.FunctionDef)]


def test_names_of_tests_are_short():
    names = [node.name for path in TEST_FILES for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef)]
    assert [name for name in names if name.startswith("test_") and len(name) > LONGEST_NAME] == []


def test_no_helper_is_defined_twice():
    """Fixtures are left out: pytest looks them up by file and folder."""
    places = defaultdict(list)
    for path in TEST_FILES:
        for function in functions(path):
            is_fixture = any("fixture" in ast.unparse(decorator) for decorator in function.decorator_list)
            if not is_fixture and not function.name.startswith(("test_", "pytest_")):
                places[function.name].append(str(path.relative_to(TESTS)))
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert twice == {}, "use one of tests/builders.py, or give each its own name"
