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
SIXTH = {
    "AdityaKulshrestha/Mooshak": "17194e79ff5cb0a31eb22a2b22aaa582f1b21dbf",
    "AkabekoLabs/Akabeko": "5f91ff352aa5f93e1341177ecec87fd9ed34e127",
    "Alpha-VLLM/LLaMA2-Accessory": "3777c43940ddfb45d3bc1046b118ca4401747ee2",
    "Alpha-VLLM/Lumina-Image-2.0": "4a4d6f856115db07e8ae127280ebcc3d9f65004e",
    "Amankhan2370/TinyZero_RAGEN": "3dd1f0d086628687af052c940b45599af8c9d7f1",
    "Arvid-pku/CS512-FSDP": "05f5c40c6ab95934dd1d8188d679258b81b87ba1",
    "Azure/MS-AMP": "9746ea85289f8e6233646e73ace35f730d1245d5",
    "FortPercent/TeleBoost": "a606e48590dd14128c64f873819bc0baf16e56c5",
    "GAIR-NLP/LiveTalk": "53b2c22a0581b27b2efdb1ec4b2e39c95189409a",
    "JeffreyOlmo/e2e-natural-language-autoencoder": "85241498e258583cd1602e837f8631c1fcba7f05",
    "Jianlong-Fu/gcr_lerobot_2": "23d122c1c3ef2f41d7cae9f52c727547e3158a9d",
    "PRIME-RL/PRIME": "18ad596f08d487bb546d80d738d99ec697bd2e75",
    "Pritiks23/training-benchmark-suite": "4ead13fe22de6e5bdf45ab279817fd277f886177",
    "Simon-Kotchou/DriveDiT": "cc21b2b19869b335f6361f58f78c2bb01a738fc3",
    "UMass-Foundation-Model/CoVLM": "e8237a34069942cba45226a43c3e44195d92065b",
    "Vatshank/playground": "f1705b07337f5dd083a9d8c918460c23065e59f7",
    "Vchitect/LiteGen": "5a3311dd176dd5e876b64c6273a455d02c48ea43",
    "ZhaoningYu1996/nanoMolmo2": "31e7b28f90aadd0ef951e8fef17fe326319d14f0",
    "allenai/molmo": "793fa387edfd6fd0f5b21eb8e0a7620a1f3799e1",
    "art-test-stack/LLM-UQ-with-TM": "64a3f77e857b084e0d51ca519c5c5522c2c495c8",
    "atharvasp24/Scalable-LLM": "caaef7b076680e04bc7721ed049df37ffcd2fab3",
    "ddaud1/fsdp": "f967c9baf33d4710056a16069e1f3fc024105be9",
    "dhmnr/invokerl": "0a5ce3a7326cadcce13b5fafc7facbf62eb7d33f",
    "eric-mitchell/direct-preference-optimization": "f8b8c0f49dc92a430bae41585f9d467d3618fe2f",
    "eye-fly/bigmachinelearning_pro2": "f74ae9fea32abfc07ecead51a684f30c355aed2e",
    "foundation-model-stack/fms-fsdp": "5a296afe42f9932f590783cb053fa0f9384e01fc",
    "juniemariam/mini-hpc": "b030fee677f1eef900bd782df0f4a9fe6d98f933",
    "maha-media/wavegpt": "2033e119c7e4045088bc63f7d42ab6b07eb7ccf8",
    "microsoft/CogACT": "b174a1b86deedfab4d198d935207e7bb0527994e",
    "microsoft/unilm": "768a3c873f598bb9b4d4dfb9267b099e35f8fe56",
    "nicosquare/matformer": "323a84541e7043f4944c33c9c6625cf6f81b8d8c",
    "nikhilbarhate99/pytorch-fsdp-ray": "75a4a5136ccfe539344dc02d446b800918ac60a1",
    "oahzxl/gpt_zero_test": "f6dcdfe1801b4809c12e4d8e663cf1e8499defe4",
    "rahvis/shc": "4038d3f583d9fad1151fc344c1bbad8d4e092dbd",
    "ritunjaym/axonforge": "cbddd30d2438447b414144b7532bbb97787b6f58",
    "sanketpurandare/playground": "02ed846479687dcdb09160ab862e2cce77eabf77",
    "sdivyanshu90/build-your-own-hybrid-distributed-training": "247b613e79c0074b2e459233016970ebd8ccc382",
    "stateset/stateset-agents": "ccad233c01810b5b68ced302f8847a20e61bcfb4",
    "stepfun-ai/Step-Audio": "a52b94d85d418cd5bc736d696d310c990befbc79",
    "windsornguyen/flash-stu": "54f78d4b91cc068ccc23554172beab1277aa8ab1",
}
SEVENTH = {
    "Alpha-VLLM/Lumina-Video": "1910f80b11366c0bfb754b0c781068aae875c28e",
    "Alpha-VLLM/Lumina-mGPT-2.0": "f44a4d7f15aaf35e097d422b5712468001489c6c",
    "EleutherAI/elk": "84e99a36a5050881d85f1510a2486ce46ac1f942",
    "EleutherAI/tuned-lens": "b26b0c3dd5bdef00aa1c152f03151dd3a2b44456",
    "Francis-Rings/StableAvatar": "46c04929cbc86cb2e0f50265d276fcf619737312",
    "Nishant-aiml/IVERI-HYBRID-SLM-MODEL": "4d1e203173c112ff3730c07fa3d0586b4e50ca0a",
    "ORNL/HydraGNN": "d251f81627e6677c8636babe52ec0b020b2d27b7",
    "OpenGVLab/LLaMA-Adapter": "521a09da84f70f6913d54b7421afa24010319e47",
    "ahmadrrrtx/xr-foundation-model": "4a90b7e74f04f82bd4d9e6d5b34b7308721d25f9",
    "anachroni-co/cunca": "a2da552b7e68f31875471e5b3243508ba4de8384",
    "aruncs2005/llama2-70b-finetuning": "b722c62fe8a0b2f2a910b27da49e0d57c9311133",
    "erenovic/krea-realtime": "7826850c8911b38e11567f644e6bf08e8e3a97a0",
    "fangyihao/qatree": "e79115565c04d09ff317ae88792efc2d8d7e62b8",
    "gaosh/ToMoE": "a3e1b655dbfd5af0382c67e2a8069301c089f022",
    "hamstergamerszhang-ops/single-gpu-llm-toolkit": "0b09cdcd535d3d5ff2b6fb13e6cdcce3b1c26d61",
    "jayaramakarthikeya/segmentation_distributed": "06f9e22fafaaba06e9befad0a010eb15138e4875",
    "jjziets/vasttools": "af471f1a9623e1e7b4cc8a72135ff1e74f8dfa2d",
    "kyegomez/Andromeda": "991bd81d8c4ed072ec4e6bc2b9c8fc66903463cc",
    "moojink/openvla-oft": "213c5ff8d6e9673885d7e4dd6f2ce73b5d8a45db",
    "rushilbhat/parallelism-experiments": "b4203804e0952ab1e6c46bedfe7f6c47d687fb4b",
    "volcengine/verl": "b178a3cd56f58b2d502255daba591e92833930a7",
    "yangdongchao/RSTnet": "5f01e1fbefe947342ac404e80fed8fbe5cc3da03",
    "yangdongchao/UniAudio": "c1146a8cecf84f1c2e877170d84998393b7e1e78",
}
EIGHTH = {
    "ByteDance-Seed/ByteCheckpoint": "93292ea95acc0573c54d73b14a17646879bc5f3c",
    "Eikor/R-ESM": "767357d84841d4f7b09b7882c720e28ef5f7c922",
    "FoundationVision/InfinityStar": "0446330b6791c41d1ef5e6a41a2dfbcea92da279",
    "KlingAIResearch/StreamHOI": "934b4fb60dee72164a5da3752f05f5ba00c42a33",
    "Lightning-AI/pytorch-lightning": "7f0c3436cd3f6ad3753125672024fc415cbcb414",
    "Modalities/modalities": "bf0e6d32450d07fd2a5786c48603694e041f9c16",
    "NCAR/miles-credit": "5e14b83c9927edf0b67cddc4f2ed33d2630d17cf",
    "NVlabs/LongLive": "7860ad9685686bc3edfd407eb4d12579ca47d689",
    "OpenBMB/RLPR": "8490fca326c625a1697a09ac1a1476a4f6f76325",
    "Tencent-Hunyuan/MixGRPO": "e5cdd6a427778d8c8b2e7a48ce16972141adbe7c",
    "Vance0124/Token-level-Direct-Preference-Optimization": "2a736ecb285394a8419b461816bce1ba3b093cc9",
    "XiaoWang-Github/ORBIT-2": "2bc05ae85355f68cd0588d97998500fefe5e0041",
    "azuresky03/distill_wan2.1": "b8b2b2913c5bef77835afb634fbd02e2ade310fa",
    "intelligent-machine-learning/dlrover": "7c3e96481f7010c3e4b7adb4c6618075e07d144e",
    "microsoft/VITRA": "c68b65e447eab1fb22c6cfa57f0a8f88041e32b3",
    "microsoft/dayhoff": "bf434ea6693fd0a775f3187e61306b11e4535226",
    "nv-tlabs/cmd": "229227a515117cc791c964ffaa69b173e91b403e",
    "rioyokotalab/moe-recipes": "0860594e0e278d4b9cea547adb5d0177f0648a38",
    "wangshankun/FastVideo": "6a997fdbb41be9e49b1284bc778864c628f6be70",
    "wuwowuyi/DPO-Direct-Preference-Optimization-replication": "38825e8863872c387b0b8bceb475e68ab68948c2",
}
NINTH = {
    "AdityaKulshrestha/Building-up-Llama": "17194e79ff5cb0a31eb22a2b22aaa582f1b21dbf",
    "Anachronism-N/Causal-Forcing": "488618525957ae3cade33db242046f2c73679eda",
    "Crazdrh/FSDP-TRAIN": "328eb1721aaabfaf21644a2419f47a47c739a55c",
    "DarylFernandes99/custom-yolo-implmentation": "1f46a9bbbc45ce944d16b3839af6df45d3e89fdd",
    "KhoomeiK/complexity-scaling": "a3dd90156742d868f62735df3e8413a8bb1169b7",
    "Lightning-AI/lightning-thunder": "1e22aacb1aef6e79718a5ca2f49ab91b993cb4ef",
    "MeiGen-AI/InfiniteTalk": "0107cd96421b3b1bef7728bde14447dbff7b2db2",
    "NathanGodey/gapetron": "d3155e16abe70cdf3429eaf9274e8f93b36516bc",
    "Pritiks23/FSDP-vs-PyTorch-Baseline-Training-Benchmark.": "4ead13fe22de6e5bdf45ab279817fd277f886177",
    "RafaelRosendof/Python_projects": "ca6120c774f8471795e3ba7b53c593d04b0e711d",
    "Rick0317/ML": "fee1279993f5f36b9a5b8c40968814009a861bd2",
    "TinyLoopX/RLLaVA": "4753d4a946a494d29096dd66b93c0ce677b97fdc",
    "Yaofang-Liu/Pusa-VidGen": "8a8c4f523a0cadb94ab7c9f1e0620a4847b92991",
    "arunshar/pi-grpo": "ce27a692a530228194f23b045ca12548c44a0c9d",
    "calvinvette/gpu-cluster-acceptance": "20d0c33adb4df7065169b1ab8d4b11b56af8920e",
    "erfanzar/OST-OpenSourceTransformers": "7a3952d445ec819a1a25613eb9fb7796dff417fa",
    "ermenkov/mlcrap": "6eab471b897af293d977671ae448489ddc470f1e",
    "goravaa/machines": "4986c4d4245721c458602f7ec0b8723d06b1557f",
    "icerain-alt/FSDPToys": "beda71f876bf07283ce0edf273a694471843ae3d",
    "jzymet/red-teaming_via_post-training": "a1f43cd268c4a8dd25310986e8df3443ffd998df",
    "krishnateja95/LangVision-NAS": "830a1e95bc1e6a82f71fdca163170c6c7d9a6203",
    "kyutai-labs/ARC-Encoder": "3e04c971323bfe929548f59239fdc7673b97059b",
    "mosaicml/composer": "6405188805a0054b4551ec49e4919c54c971d0e8",
    "nehapradeep/rl-weight-broadcast": "89691499fbfd4a0c7d0b953e8661c811ca738da5",
    "nveshaan/mccl_benchmark": "02676246463afdf69ef3947cd0c2184d72542d3a",
    "nvidia-cosmos/cosmos-transfer1": "5005e823dbd478ad8e51f6bc28a913a13a994b5f",
    "vodaiphuoc/Checkin_App": "903bd7de733e338a5f5a9325c4abfa201c500b29",
}
"""Repositories and the commits that were read."""
SETS = {
    "first": (REPOSITORIES, 20261117, 40),
    "second": (OTHERS, 20261118, 20),
    "third": (THIRD, 20261119, 26),
    "fourth": (FOURTH, 20261120, 40),
    "fifth": (FIFTH, 20261121, 12),
    "sixth": (list(SIXTH), 20261122, 40),
    "seventh": (list(SEVENTH), 20261123, 20),
    "eighth": (list(EIGHTH), 20261124, 20),
    "ninth": (list(NINTH), 20261125, 20),
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
