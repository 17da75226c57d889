"""Draw FSDP1 constructor calls of public repositories, to read what `shardwise migrate` makes of each.

python -m benchmarks.migrate_sites FOLDER [SET]

FOLDER holds a checkout of each repository of a set, named owner+name. Lists and seeds were committed before any of the
code was read. At most two calls are drawn of each repository, so that large ones do not crowd out the rest; tests are
left out.
"""

import ast
import random
import sys
from pathlib import Path

PER_REPOSITORY = 2
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
OTHERS = [
    "4DVLab/UniAfford",
    "7eraflops/Music-Source-Separation-Training",
    "BolUCSF/Diffusion_Modality",
    "Brain2nd/NeuronSpark-V1",
    "CJL196/small-gpt",
    "ChenYuHengSJTU/stylegan2-pytorch",
    "InterUniverse/deepseek-fine-tuning",
    "IslinaS/TKGQA",
    "LinB203/FSDP-Training",
    "Luciennnnnnn/LiteRAWFormer",
    "MercuryCod/FuncGrasp",
    "MostHumble/PatientTrajectoryForecasting",
    "NetX-lab/DSV",
    "Technolog796/RuSigLIP",
    "aliang8/reward_fm",
    "carlosbrian459/KnapFormer",
    "damcuong8/translate_vi_en_bidir",
    "facebookresearch/capi",
    "fengq1a0/TrainingFramework",
    "fpcsong/mha2gqa",
    "gabrielolympie/moe-pruner",
    "hectopascal/tinyvlm-implementation",
    "jameelhassan/parallel-ViT",
    "kaistAI/Effects-of-Context-in-Instruction-Tuning",
    "lizixi-0x2F/T2ITrainer",
    "lora-x/cs229s-nanoGPT",
    "magicsquares137/luvai",
    "marawangamal/TJDNet",
    "mdy666/mdy_triton",
    "nauyan/PyTorch-Distributed-Tutorials",
    "roman0810/sound2image",
    "tlebryk/nerre-llama",
    "ucasmjc/animetalker",
    "xingyaoww/verl",
    "y-akbal/SdP-Net",
    "zhangNopainsNogains/GuardSpace",
]
THIRD = [
    "AndreRab/Large-Scale-computing-Distributed-LLM-Training",
    "ArangurenAndres/olmo_custom",
    "Artem-Kosaretskii/nlp",
    "Ashx098/fsdp",
    "HamidShojanazeri/LLM_fine_tuning",
    "Jack31098/llm_training_demo",
    "JoeyOL/FSDP-Communication-Optimization",
    "MaxLEAF3824/kg_llm",
    "MaximeSongIdris/MegaVIT_bench_system",
    "Naman-Bhrgv/MultiGPU_Training_Examples",
    "Nicolas-BZRD/llm-recipes",
    "PranavShashidhara/distributed-llm-stack",
    "Sumeet2807/LLMs",
    "Superone77/Efficient_GPT2",
    "aagneye/GPT-mini",
    "ahxt/mini-llm-pretraining",
    "aidando73/hello-distributed-data-parallel",
    "aleksandrk0/mini-llm-distributed",
    "arunmadhusud/nanoGPT-distributed",
    "aviinashh77/nemotron-finetune",
    "banyan-god/llama2.c",
    "chats-bug/ddp",
    "derinworks/penr-oz-neural-network-v4-torch-fsdp",
    "eashanadhikarla/U-EGformer",
    "himudigonda/Parallel-Computing-Pytorch",
    "ibrahimssd/distributed-training-best-practices",
    "jmoral1943/distributed-transformer",
    "keanshi-nlp/BD_Assignment",
    "marcofariasmx/nested_learning",
    "marcoscannabrava/image_classifier",
    "moonbucks/parallelism_practices",
    "prsridha/fsdp_test",
    "ruii-wu/cs5242a7",
    "shivangraval50/distributed-training-lab",
    "tang0389/himuon",
    "tanny1412/distributed-llm-training",
    "tibffc/distributed-training",
    "unconst/boltzmann",
    "vodaiphuoc/face_training_only",
    "wdlctc/lc",
]
FOURTH = [
    "ARJ8102/llm_train",
    "Aryan8912/CUDA_Practice",
    "ContextualAI/HALOs",
    "DataCTE/Decentralized-Diffusion-Models",
    "Dusekt/ProXtal-LM",
    "HAYDARKILIC/high_performance_computing",
    "JHNMACHINE/harold",
    "Jacobson-CompSysBio/JAIL-RAG",
    "Kevin1home/lsml-distributed-training",
    "Lainshower/CoT-Internalize",
    "MHGanainy/teuken_hier",
    "MaxwellJryao/MLSys",
    "MedARC-AI/OpenMidnight",
    "Philon-AI/latent-steering",
    "Priyansh-100/TensorForge",
    "RavidLightricks/llama-recipes",
    "Stability-AI/StableCascade",
    "UnaryLab/lit_silicon_no_tuning_nvidia",
    "WHB139426/Grounded-Video-LLM",
    "Wharpheus/gpt4all",
    "aliciayuting/coldhottrain",
    "allenai/OLMo",
    "ammmanism/fast-gpt-lab",
    "aruncs2005/falcon-pytorch-fsdp-sagemaker",
    "bargav25/llm",
    "debajyotidasgupta/nano-qwen",
    "dhanyamd/nanopysche",
    "diegodoimo/geometry_icl_finetuning",
    "facebookresearch/dinov2",
    "fingertap/llama_fsdp",
    "free001style/efficient-dl-systems",
    "hongyihuang/llama2.c",
    "hzk1102/IT5423-DistributedParalellTraining",
    "iotaaxel/distributed-training-lab",
    "kgarg2468/rl-fsdp-distillation",
    "krishna1803/nanoGPT",
    "lessw2020/nanoGPT_2d",
    "maverick0721/Multimodal_Vision-Language-Model_Research",
    "maziars/RC-DPO",
    "mike2505/GeorgianTTS",
    "mit-han-lab/efficientvit",
    "mlfoundations/open_flamingo",
    "nervouswizard/Uni3C",
    "nupurkmr9/npedit",
    "rmaguado/radio-foundation",
    "rushikeshdhumal/amarel-llm-foundry",
    "shoaibahmed/test",
    "vivekvkashyap/async-rl-lab",
    "xjy949003794-boop/PretrainLab-X",
    "xushilin1/Demos",
    "yandex-research/switti",
    "yyuncong/ExploreGraph",
]
FIFTH = [
    "A-R-Hariri/Foundational_EMG",
    "APiaoG/SymDPO",
    "Aorunfa/llava_finetune",
    "Archit03/SPARSA-LM-Base-0.1",
    "C-W-D/CasCoD",
    "Coluding/diffusion-egocentric",
    "JanousZ/DreamOmni2",
    "SaeedNajafi/llm-research",
    "ViktorooReps/llm-experiments",
    "abigsmall/ml-model-training-assignment",
    "arisel117/DistributedLearning",
    "codingwithsurya/distributed-transformer",
    "glanzz/biomedicalimage",
    "hihihihiwsf/cad_llm",
    "jedell/rag",
    "joeyllm/models-magpie",
    "karlstratos/minGPU",
    "liao1995/Metis",
    "manavanandani/RLInfra",
    "mlexpos/adana",
    "saissd/Distributed-ML-Training-Inference-Optimization",
    "slavivo/dsaa",
    "umd-huang-lab/tracevla",
    "yunyangge/UltraI2V",
    "zhc180/distributed-llm-trainer",
    "zishen-ucap/Sonic",
]
SETS = {
    "first": (REPOSITORIES, 20261117, 40),
    "second": (OTHERS, 20261118, 20),
    "third": (THIRD, 20261119, 26),
    "fourth": (FOURTH, 20261120, 40),
    "fifth": (FIFTH, 20261121, 12),
}
"""Repositories, seed and number of calls."""
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


def draw(folder: Path, repositories: list[str], seed: int, count: int) -> list[tuple[str, str, int]]:
    """The calls to read: repository, file, line."""
    rng = random.Random(seed)
    pool = []
    for name in repositories:
        found = sites(folder / name.replace("/", "+"))
        chosen = rng.sample(found, min(PER_REPOSITORY, len(found)))
        pool += [(name, path, line) for path, line in sorted(chosen)]
    return sorted(rng.sample(pool, min(count, len(pool))))


if __name__ == "__main__":
    for name, path, line in draw(Path(sys.argv[1]), *SETS[sys.argv[2] if len(sys.argv) > 2 else "first"]):
        print(f"{name} {path}:{line}")
