"""Problems and their traces: files, folders and hub datasets in, token ids under the model's tokenizer out."""

from luffy.data.dataset import ProblemDataset, load_problems
from luffy.data.encode import PAPER_SYSTEM_PROMPT, Encoder, PromptStyle
from luffy.data.reasoning_gym import is_generated
from luffy.data.sampler import ProblemSampler
from luffy.data.schemas import READERS, detect
from luffy.data.sources import RowError, RowSource, open_source

__all__ = [
    "PAPER_SYSTEM_PROMPT",
    "READERS",
    "Encoder",
    "ProblemDataset",
    "ProblemSampler",
    "PromptStyle",
    "RowError",
    "RowSource",
    "detect",
    "is_generated",
    "load_problems",
    "open_source",
]
