"""The quickstart's tasks: what their problems are, and which recipes train on them."""

from __future__ import annotations

from dataclasses import dataclass

from luffy.config import Config, built_in_recipes, load_config
from luffy.errors import UserError
from luffy.run_folder.runs import flat_config
from luffy.schema import nearest


@dataclass(frozen=True)
class QuickstartTask:
    """``recipes``: the size of its recipes, e.g. ``tiny/luffy``. ``intro``: printed before training, with rich's marks.
    ``notes``: below the report's tables. ``out``: the default folder."""

    name: str
    recipes: str
    default_methods: str
    out: str
    intro: tuple[str, ...]
    notes: str

    @property
    def methods(self) -> list[str]:
        """Names of the methods that have a recipe: of every method, or of those in the folder of the task."""
        known = built_in_recipes()
        folder = "methods" if f"sizes/{self.recipes}" in known else self.recipes
        names = [name.removeprefix(f"{folder}/") for name in known if name.startswith(f"{folder}/")]
        return [name for name in names if name != SHARED]

    @property
    def title(self) -> str:
        return "luffy quickstart" if self.name == DEFAULT_TASK else f"luffy quickstart --task {self.name}"


SFT_RUN = "runs/tiny-sft/"  # where recipes of the tiny size look for what `luffy sft tiny/sft` left
SHARED = "chains"  # recipe with the settings that the methods of a folder share
DEFAULT_TASK = "chains"
HELD_OUT = (
    "Held-out problems have 8 terms like the training problems; the OOD set has 11. Accuracies of the curves are "
    "sampled at temperature 1, as in training. All methods see the same problems in the same order; "
)
TASKS = {
    task.name: task
    for task in (
        QuickstartTask(
            name="chains",
            recipes="tiny",
            default_methods="on_policy,sft,luffy",
            out="runs/quickstart",
            intro=(
                "Chains of sums, e.g. [bold]47+5-3+8=?[/] -> +5=52 -3=49 +8=57 #### 57",
                "The base model knows the steps, but gets 19 of 20 wrong by one: its own samples are never right.\n",
            ),
            notes=HELD_OUT + "on-policy RL and LUFFY draw 8 samples for each (LUFFY: 7 and the trace), SFT learns from "
            "the same traces. sft-rl makes its SFT steps itself, and they count; other methods initialised or "
            "distilled from the SFT model use the one with the same seed, whose steps and seconds are not counted as "
            "theirs.",
        ),
        QuickstartTask(
            name="tools",
            recipes="tools",
            default_methods="on_policy,luffy",
            out="runs/quickstart-tools",
            intro=(
                "Chains of sums with a tool, e.g. [bold]47+5-3=?[/] -> add(47, 5) = 52, add(52, -3) = 49, #### 49",
                "In its head the base model gets 19 of 20 steps wrong by one. It knows how to call the tool, but does "
                "so in 1 of 25 turns: no sample of its own calls it for a whole chain.\n",
            ),
            notes=HELD_OUT + "an episode is up to 11 turns, and after each call of the tool its answer is the next "
            "message. On-policy RL plays 8 episodes for each problem, LUFFY 7 beside a teacher's trajectory, which "
            "calls the tool for every step. Tokens of the tool's answers are in no loss. An evaluation takes the first "
            "100 problems of each set.",
        ),
    )
}


def find_task(name: str) -> QuickstartTask:
    if name in TASKS:
        return TASKS[name]
    listed = f"; there are {', '.join(TASKS)}"
    raise UserError(f"--task: no task {name!r}{nearest(name, list(TASKS)) or listed}")


def choose_methods(methods: str, task: QuickstartTask = TASKS[DEFAULT_TASK]) -> list[str]:
    """Recipe names in the order to run them: those that need the SFT model come last, and add SFT."""
    known = task.methods
    named = [name.strip().replace("-", "_") for name in methods.split(",") if name.strip()]
    listed = f"; there are {', '.join(known)}, and all"
    for name in named:
        if name not in (*known, "all"):
            raise UserError(f"--methods: no method {name!r}{nearest(name, known) or listed}")
    if not named:
        raise UserError(f"--methods names none{listed}")
    chosen = known if "all" in named else list(dict.fromkeys(named))
    later = [name for name in chosen if sft_model_keys(load_config(f"{task.recipes}/{name}"))]
    first = ["sft"] if later and "sft" not in chosen else []
    return [*first, *(name for name in chosen if name not in later), *later]


def sft_model_keys(cfg: Config) -> dict[str, str]:
    """Config keys that name the SFT model, with its path inside the run folder of SFT."""
    values = {key: value for key, value in flat_config(cfg).items() if isinstance(value, str)}
    return {key: value.removeprefix(SFT_RUN) for key, value in values.items() if value.startswith(SFT_RUN)}
