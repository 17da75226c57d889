"""Draw FSDP1 constructor calls of public repositories, to read what `shardwise migrate` makes of each.

python -m benchmarks.migrate_sites FOLDER

FOLDER holds a checkout of each repository below, named owner+name. The list and the seed were committed before any of
the code was read. At most two calls are drawn of each repository, so that large ones do not crowd out the rest; tests
are left out.
"""

import ast
import random
import sys
from pathlib import Path

SEED, COUNT, PER_REPOSITORY = 20261117, 40, 2
REPOSITORIES = [
    "AllenInstitute/distributed-vae",
    "Alpha-VLLM/Lumina-T2X",
    "Alpha-VLLM/Lumina-mGPT",
    "ByteDance-Seed/Bagel",
    "FoundationVision/Infinity",
    "FoundationVision/LlamaGen",
    "Gvilenius/weipipe",
    "HazyResearch/lolcats",
    "IBM/dolomite-engine",
    "InternLM/InternEvo",
    "NVlabs/Sana",
    "RLinf/RLinf",
    "Ranjithnathk/Parallel-Deep-Learning-for-Leukemia-Classification-from-Blood-Smear-Images",
    "TRI-ML/prismatic-vlms",
    "Vahe1994/AQLM",
    "Wan-Video/Wan2.1",
    "XueZeyue/DanceGRPO",
    "abacaj/fine-tune-mistral",
    "abacaj/train-with-fsdp",
    "ajayvohra2005/gpt2-fsdp",
    "baraql/lai-proj",
    "chrisociepa/allamo",
    "conceptofmind/PaLM",
    "eminorhan/simsiam",
    "eminorhan/visual-recognition-memory",
    "facebookresearch/coconut",
    "facebookresearch/multimodal",
    "facebookresearch/optimizers",
    "faizanahemad/dot-tokens-communication",
    "foundation-model-stack/foundation-model-stack",
    "genmoai/mochi",
    "guandeh17/Self-Forcing",
    "hiyouga/EasyR1",
    "krayF1sh/ecot-prm",
    "kyutai-labs/moshi-finetune",
    "mistralai/mistral-finetune",
    "mohame54/Dit",
    "neelsjain/NEFTune",
    "nvidia-cosmos/cosmos-predict1",
    "openvla/openvla",
    "oumi-ai/oumi",
    "sab148/nxtaim-distributed-models",
    "saforem2/ezpz",
    "seopbo/llmpy",
    "sirluk/pytorch_transformer",
    "tianweiy/CausVid",
    "wuwowuyi/DPO-and-GRPO-implementation",
    "xdit-project/xDiT",
    "yangdongchao/ALMTokenizer2",
]
CLASS = "FullyShardedDataParallel"


def constructor_calls(text: str) -> list[int]:
    """Lines of the calls of torch's FSDP1 class."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    names = {CLASS}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed.fsdp"):
            names |= {alias.asname or alias.name for alias in node.names if alias.name == CLASS}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sorted(call.lineno for call in calls if ast.unparse(call.func).rpartition(".")[2] in names)


def sites(repository: Path) -> list[tuple[str, int]]:
    """Files and lines of the constructor calls outside of tests, in a fixed order."""
    found = []
    for path in sorted(repository.rglob("*.py")):
        inside = path.relative_to(repository)
        if not any(part.startswith("test") for part in inside.parts) and path.is_file():
            text = path.read_text(errors="replace")
            if "fsdp" in text:
                found += [(str(inside), line) for line in constructor_calls(text)]
    return found


def draw(folder: Path) -> list[tuple[str, str, int]]:
    """The calls to read: repository, file, line."""
    rng = random.Random(SEED)
    pool = []
    for name in REPOSITORIES:
        found = sites(folder / name.replace("/", "+"))
        chosen = rng.sample(found, min(PER_REPOSITORY, len(found)))
        pool += [(name, path, line) for path, line in sorted(chosen)]
    return sorted(rng.sample(pool, min(COUNT, len(pool))))


if __name__ == "__main__":
    for name, path, line in draw(Path(sys.argv[1])):
        print(f"{name} {path}:{line}")
