"""Who and what the demonstration is made of, as data. All of it is invented."""

from __future__ import annotations

from dataclasses import dataclass

DAYS = 90
"""Length of the history."""

BEFORE = DAYS + 1
"""The organisation is that many days old, so that its names and roles cover the history."""

# code, English name, Chinese name, time zone
SITES = (
    ("shanghai", "Shanghai", "上海", "Asia/Shanghai"),
    ("beijing", "Beijing", "北京", "Asia/Shanghai"),
    ("hangzhou", "Hangzhou", "杭州", "Asia/Shanghai"),
)

# code, parent, English name, Chinese name, cost centre
DEPARTMENTS = (
    ("qinghe", "", "Qinghe Research", "清河研究院", "QH-0000"),
    ("foundation", "qinghe", "Foundation Models", "基础模型部", "FM-0100"),
    ("pretraining", "foundation", "Pre-training", "预训练组", "FM-0110"),
    ("posttraining", "foundation", "Post-training", "后训练组", "FM-0120"),
    ("vision", "qinghe", "Vision & Multimodal", "视觉与多模态部", "VM-0200"),
    ("video", "vision", "Video Generation", "视频生成组", "VM-0210"),
    ("perception", "vision", "Perception", "感知组", "VM-0220"),
    ("search", "qinghe", "Search & Ads", "搜索广告部", "SA-0400"),
    ("inference", "search", "Online Inference", "在线推理组", "SA-0410"),
    ("ranking", "search", "Ranking", "排序组", "SA-0420"),
    ("drug", "qinghe", "Drug Discovery", "药物研发部", "DD-0300"),
    ("platform", "qinghe", "Platform Engineering", "平台工程部", "PE-0500"),
)


@dataclass(frozen=True)
class Person:
    """A sign-in. `roles` are (role, department code; "" = the installation)."""

    username: str
    name: str
    department: str
    roles: tuple[tuple[str, str], ...]


def _asks(department: str) -> tuple[tuple[str, str], ...]:
    return (("researcher", department),)


PEOPLE = (
    Person("lin.yue", "林悦", "video", _asks("video")),
    Person("chen.hao", "陈浩", "vision", (("lead", "vision"), ("researcher", "vision"))),
    Person("zhao.rui", "赵睿", "platform", (("pool_admin", ""),)),
    Person("sun.mei", "孙梅", "qinghe", (("finance", ""),)),
    Person("he.jing", "何静", "qinghe", (("auditor", ""),)),
    Person("wu.tao", "吴涛", "foundation", (("lead", "foundation"), ("researcher", "foundation"))),
    Person("ma.lin", "马琳", "search", (("lead", "search"), ("researcher", "search"))),
    Person("emma.clark", "Emma Clark", "drug", (("lead", "drug"), ("researcher", "drug"))),
    Person("zhou.peng", "周鹏", "platform", (("lead", "platform"), ("researcher", "platform"))),
    Person("qian.yi", "钱毅", "platform", (("pool_admin", ""),)),
    Person("he.min", "何敏", "qinghe", (("finance", ""),)),
    Person("gao.fei", "高飞", "video", _asks("video")),
    Person("liu.yang", "刘洋", "video", _asks("video")),
    Person("tang.wei", "唐薇", "perception", _asks("perception")),
    Person("anna.schmidt", "Anna Schmidt", "perception", _asks("perception")),
    Person("zhang.wei", "张伟", "pretraining", _asks("pretraining")),
    Person("wang.fang", "王芳", "pretraining", _asks("pretraining")),
    Person("alex.meyer", "Alex Meyer", "pretraining", _asks("pretraining")),
    Person("yang.yang", "杨阳", "posttraining", _asks("posttraining")),
    Person("priya.nair", "Priya Nair", "posttraining", _asks("posttraining")),
    Person("huang.lei", "黄磊", "ranking", _asks("ranking")),
    Person("sofia.rossi", "Sofia Rossi", "inference", _asks("inference")),
    Person("deng.chao", "邓超", "inference", _asks("inference")),
    Person("feng.yu", "冯宇", "drug", _asks("drug")),
    Person("omar.hassan", "Omar Hassan", "platform", _asks("platform")),
)
MAIN = ("lin.yue", "chen.hao", "zhao.rui", "sun.mei", "he.jing")
"""Sign-ins that are printed, one for each role."""

DATA_ADMIN = "zhao.rui"
"""Who may open the data admin too."""

# What each department may have of each flavour: guaranteed GPUs (children lie within their parent).
GRANTS: dict[str, dict[str, int]] = {
    "h800-80gb": {
        "qinghe": 16, "foundation": 10, "pretraining": 6, "posttraining": 4, "vision": 5, "video": 4,
        "perception": 1, "drug": 1,
    },
    "a100-80gb": {
        "qinghe": 16, "foundation": 5, "pretraining": 3, "posttraining": 2, "vision": 6, "video": 3,
        "perception": 3, "drug": 4, "platform": 1,
    },
    "h20-96gb": {
        "qinghe": 8, "foundation": 2, "posttraining": 2, "search": 5, "inference": 3, "ranking": 2, "platform": 1,
    },
    "l40s-48gb": {
        "qinghe": 8, "vision": 3, "video": 2, "perception": 1, "search": 3, "ranking": 2, "inference": 1,
        "platform": 2,
    },
    "a30-24gb": {
        "qinghe": 8, "vision": 2, "perception": 2, "search": 3, "inference": 2, "ranking": 1, "platform": 2,
    },
    "l20-48gb": {"qinghe": 8, "search": 3, "inference": 2, "ranking": 1, "drug": 3, "platform": 2},
}  # fmt: skip
BORROW_GPUS = 8
"""Departments below the root may borrow so many above their guarantee."""

# flavour: price per GPU-hour at first, since 30 days ago, in 30 days (None: no change)
PRICES: dict[str, tuple[str, str | None, str | None]] = {
    "h800-80gb": ("16.80", "16.00", "15.60"),
    "a100-80gb": ("10.40", "10.00", None),
    "h20-96gb": ("9.60", "9.00", "8.40"),
    "l40s-48gb": ("5.50", None, "5.80"),
    "l20-48gb": ("4.20", None, None),
    "a30-24gb": ("2.80", "2.50", None),
}

# department: money per month, per quarter (None: no such budget)
BUDGETS: dict[str, tuple[str, str | None]] = {
    "qinghe": ("320000", "780000"),
    "foundation": ("130000", None),
    "vision": ("90000", "210000"),
    "search": ("45000", None),
    "drug": ("32000", None),
    "platform": ("24000", None),
}

PURPOSES: dict[str, tuple[str, ...]] = {
    "pretraining": (
        "7B base model, 3rd data mix",
        "长上下文预训练，第二阶段",
        "Tokenizer ablation, 1B",
        "数据配比消融实验",
    ),
    "posttraining": (
        "DPO run on preference data v4",
        "指令微调，代码与数学",
        "Reward model, round 2",
        "蒸馏到 1.5B",
    ),
    "video": ("Text-to-video, 720p stage", "视频生成基线复现", "VAE with 8× compression", "运动一致性评测"),
    "perception": ("Detector on night scenes", "点云分割训练", "Labelling model, batch 14", "多目标跟踪评测"),
    "inference": (
        "Embedding service, offline rebuild",
        "在线推理压测",
        "Quantized 70B, latency test",
        "召回模型批量推理",
    ),
    "ranking": (
        "CTR model, daily refresh",
        "排序模型增量训练",
        "Feature ablation, week 40",
        "多任务排序实验",
    ),
    "drug": ("Docking of 2 M ligands", "蛋白结构预测批任务", "Molecular dynamics, 40 ns", "Affinity model"),
    "platform": ("CI images with CUDA 12.4", "监控探针回归测试", "NCCL all-reduce benchmark", "驱动升级验证"),
}
