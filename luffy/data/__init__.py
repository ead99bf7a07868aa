"""Problems and their traces: files, folders and hub datasets in, token ids under the model's tokenizer out."""

from luffy.data.dataset import ProblemDataset, ProblemSampler, load_problems
from luffy.data.encode import Encoder

__all__ = ["Encoder", "ProblemDataset", "ProblemSampler", "load_problems"]
