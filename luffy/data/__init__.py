"""Problems and their traces: files, folders and hub datasets in, token ids under the model's tokenizer out."""

from luffy.data.dataset import ProblemDataset, load_problems
from luffy.data.encode import Encoder
from luffy.data.sampler import ProblemSampler

__all__ = ["Encoder", "ProblemDataset", "ProblemSampler", "load_problems"]
