"""The tables that the MOON paper prints, as data: a line per method under moonopt's name for it, Δm last.

What the paper calls Muon is Muon on the mean loss ("muon"). Where a printed Δm does not follow from its row, the number is kept
as printed; tests/bench/test_paper.py names each such case.
"""

from collections.abc import Mapping, Sequence

from moonopt.bench.base import Published
from moonopt.bench.metrics import Metric


def _table(source: str, metrics: Sequence[Metric], text: str, reference: str | None = None) -> Published:
    """A table from its text. A line has a method, its number for each metric, and Δm where the paper has one."""
    names = [metric.name for metric in metrics]
    rows, drops = {}, {}
    for line in text.strip().splitlines():
        method, *numbers = line.split()
        values = [float(number) for number in numbers]
        rows[method] = dict(zip(names, values[: len(names)], strict=True))
        if len(values) == len(names) + 1:
            drops[method] = values[-1]
    return Published(source, rows, drops, reference)


NYUV2_METRICS = (
    Metric("mIoU", higher=True, task="segmentation", digits=2, unit="%"),
    Metric("pixel accuracy", higher=True, task="segmentation", digits=2, unit="%"),
    Metric("absolute error", higher=False, task="depth"),
    Metric("relative error", higher=False, task="depth"),
    Metric("mean angle", higher=False, task="normal", digits=2, unit="°"),
    Metric("median angle", higher=False, task="normal", digits=2, unit="°"),
    Metric("within 11.25°", higher=True, task="normal", digits=2, unit="%"),
    Metric("within 22.5°", higher=True, task="normal", digits=2, unit="%"),
    Metric("within 30°", higher=True, task="normal", digits=2, unit="%"),
)

NYUV2 = _table(
    "MOON paper, table on NYU-v2",
    NYUV2_METRICS,
    """
    stl       38.30  63.76  0.6754  0.2780  25.01  19.21  30.14  57.20  69.15
    ls        39.29  65.33  0.5493  0.2263  28.15  23.96  22.09  47.50  61.08   5.59
    si        38.45  64.27  0.5354  0.2201  27.60  23.37  22.53  48.57  62.32   4.39
    rlw       37.17  63.77  0.5759  0.2410  28.27  24.18  22.26  47.05  60.62   7.78
    dwa       39.11  65.31  0.5510  0.2285  27.61  23.18  24.17  50.18  62.39   3.57
    uw        36.87  63.17  0.5446  0.2260  27.04  22.61  23.54  49.05  63.65   4.05
    mgda      28.40  58.24  0.5979  0.2335  25.00  19.49  29.56  56.84  69.11   1.23
    pcgrad    39.22  65.98  0.5373  0.2273  27.27  23.08  23.17  49.23  62.98   3.40
    graddrop  39.39  65.12  0.5455  0.2279  27.48  22.96  23.38  49.44  62.87   3.58
    cagrad    39.00  65.77  0.5561  0.2135  26.30  21.53  25.86  52.47  65.65  -0.12
    imtl-g    39.35  65.60  0.5426  0.2256  26.02  21.19  26.20  53.13  66.24  -0.76
    nash-mtl  40.13  65.93  0.5261  0.2171  25.26  20.08  28.40  55.47  68.15  -4.04
    famo      36.41  63.20  0.5406  0.2182  25.01  19.14  30.22  57.45  69.37  -4.11
    moon      39.41  67.03  0.4891  0.2091  25.61  20.27  28.89  54.87  67.32  -4.63
    """,
    reference="stl",
)

CITYSCAPES_METRICS = (
    Metric("mIoU", higher=True, task="segmentation", digits=2, unit="%"),
    Metric("pixel accuracy", higher=True, task="segmentation", digits=2, unit="%"),
    Metric("absolute error", higher=False, task="depth"),
    Metric("relative error", higher=False, task="depth", digits=2),
)

CITYSCAPES = _table(
    "MOON paper, table on CityScapes and CelebA",
    CITYSCAPES_METRICS,
    """
    stl       74.01  93.16  0.0125  27.77
    ls        70.95  91.73  0.0161  33.83  14.11
    rlw       74.57  93.41  0.0158  47.79  24.38
    dwa       75.24  93.52  0.0160  44.37  21.45
    uw        72.02  92.85  0.0140  30.13   5.89
    mgda      69.60  91.87  0.0134  36.05  11.02
    pcgrad    75.13  93.48  0.0154  42.07  18.29
    graddrop  75.27  93.53  0.0157  47.54  23.73
    cagrad    75.16  93.48  0.0141  37.60  11.64
    imtl-g    75.33  93.49  0.0135  38.41  11.10
    nash-mtl  75.41  93.66  0.0129  35.02   6.82
    famo      72.48  92.56  0.0148  29.52   6.93
    moon      78.61  94.36  0.0126  31.41   1.54
    """,
    reference="stl",
)

QM9_METRICS = (
    Metric("mu", higher=False, task="mu", digits=3, unit="D"),
    Metric("alpha", higher=False, task="alpha", digits=3, unit="a0³"),
    Metric("homo", higher=False, task="homo", digits=1, unit="meV"),
    Metric("lumo", higher=False, task="lumo", digits=1, unit="meV"),
    Metric("r2", higher=False, task="r2", digits=2, unit="a0²"),
    Metric("zpve", higher=False, task="zpve", digits=2, unit="meV"),
    Metric("U0", higher=False, task="U0", digits=1, unit="meV"),
    Metric("U", higher=False, task="U", digits=1, unit="meV"),
    Metric("H", higher=False, task="H", digits=1, unit="meV"),
    Metric("G", higher=False, task="G", digits=1, unit="meV"),
    Metric("cv", higher=False, task="cv", digits=3, unit="cal/(mol K)"),
)

QM9 = _table(
    "MOON paper, table on QM9",
    QM9_METRICS,
    """
    stl       0.07  0.18   60.6   53.9  0.50   4.53   58.8   64.2   63.8   66.2  0.07
    ls        0.11  0.33   73.6   89.7  5.20  14.06  143.4  144.2  144.6  140.3  0.13  177.6
    si        0.31  0.35  149.8  135.7  1.00   4.51   55.3   55.8   55.8   55.3  0.11   77.8
    rlw       0.11  0.34   76.9   92.8  5.87  15.47  156.3  157.1  157.6  153.0  0.14  203.8
    dwa       0.11  0.33   74.1   90.6  5.09  13.99  142.3  143.0  143.4  139.3  0.13  175.3
    uw        0.39  0.43  166.2  155.8  1.07   4.99   66.4   66.8   66.8   66.2  0.12  108.0
    mgda      0.22  0.37  126.8  104.6  3.23   5.69   88.4   89.4   89.3   88.0  0.12  120.5
    pcgrad    0.11  0.29   75.9   88.3  3.94   9.15  116.4  116.8  117.2  114.5  0.11  125.7
    cagrad    0.12  0.32   83.5   94.8  3.22   6.93  114.0  114.3  114.5  112.3  0.12  112.8
    imtl-g    0.14  0.29   98.3   93.9  1.75   5.70  101.4  102.4  102.0  100.1  0.10   77.2
    nash-mtl  0.10  0.25   82.9   81.9  2.43   5.38   74.5   75.0   75.1   74.2  0.09   62.0
    famo      0.16  0.28   85.0   87.0  1.81   5.13   68.2   68.5   68.7   67.8  0.09   57.3
    moon      0.07  0.24   52.9   71.0  3.35   5.67   46.4   46.7   46.9   46.3  0.08   49.9
    """,
    reference="stl",
)

#: The STL errors of QM9 with the digits that the protocol of Nash-MTL divides by; the paper prints them rounded.
QM9_STL: Mapping[str, float] = dict(
    zip(
        (metric.name for metric in QM9_METRICS),
        (0.0671, 0.1814, 60.576, 53.915, 0.5027, 4.539, 58.838, 64.244, 63.852, 66.223, 0.07212),
        strict=True,
    )
)

MULTIMNIST_METRICS = (
    Metric("left accuracy", higher=True, task="left", digits=2, unit="%"),
    Metric("right accuracy", higher=True, task="right", digits=2, unit="%"),
    Metric("average accuracy", higher=True, digits=2, unit="%"),
)

MULTIMNIST = _table(
    "MOON paper, tables on MultiMNIST and on naive combinations with Muon",
    MULTIMNIST_METRICS,
    """
    mgda       95.58  94.10  94.84
    pcgrad     94.26  93.60  93.93
    cagrad     95.65  94.72  95.19
    imtl-g     94.57  94.43  94.50
    nash-mtl   95.33  94.38  94.86
    famo       95.89  94.88  95.39
    mgda+muon  94.61  93.65  94.13
    famo+muon  95.61  94.33  94.97
    muon       95.39  94.82  95.11
    moon       95.99  95.31  95.65
    """,
)

#: MOON's average accuracy on MultiMNIST (%) by beta and by gamma, the other at 1e-4 and 1e-3.
MULTIMNIST_BETA: Mapping[float, float] = {1e-5: 95.11, 5e-5: 95.53, 1e-4: 95.65, 5e-4: 95.48, 1e-3: 94.93}
MULTIMNIST_GAMMA: Mapping[float, float] = {1e-2: 95.14, 5e-2: 95.33, 1e-3: 95.65, 5e-3: 95.62, 1e-4: 95.28}

MULTIMNIST_COMPONENTS = _table(
    "MOON paper, ablation of the orthonormalized updates and momentum on MultiMNIST",
    MULTIMNIST_METRICS,
    """
    moon                   95.99  95.31  95.65
    with-euclidean-update  95.18  94.42  94.80
    without-momentum       93.96  93.44  93.70
    """,
)

# F1 of single-task learning with the CNN, by attribute in the order of CelebA's list: FAMO's repository, issue 2. The paper
# prints no F1 of its own.
_CELEBA_STL = """
    5_o_Clock_Shadow 0.6736886   Arched_Eyebrows     0.68121034  Attractive        0.81524944  Bags_Under_Eyes  0.5760289
    Bald             0.7205613   Bangs               0.8555076   Big_Lips          0.38203922  Big_Nose         0.58225113
    Black_Hair       0.787647    Blond_Hair          0.8321292   Blurry            0.5029583   Brown_Hair       0.68694085
    Bushy_Eyebrows   0.6781237   Chubby              0.5240381   Double_Chin       0.5161666   Eyeglasses       0.95694304
    Goatee           0.6968786   Gray_Hair           0.67976356  Heavy_Makeup      0.8808315   High_Cheekbones  0.8582131
    Male             0.97034     Mouth_Slightly_Open 0.93267566  Mustache          0.5057539   Narrow_Eyes      0.40307626
    No_Beard         0.9703734   Oval_Face           0.48644206  Pale_Skin         0.60786104  Pointy_Nose      0.5261031
    Receding_Hairline 0.56907415 Rosy_Cheeks         0.59815097  Sideburns         0.6858371   Smiling          0.924108
    Straight_Hair    0.5424991   Wavy_Hair           0.7406311   Wearing_Earrings  0.71019936  Wearing_Hat      0.87365365
    Wearing_Lipstick 0.9305602   Wearing_Necklace    0.33704284  Wearing_Necktie   0.7647628   Young            0.91907
"""

#: The F1 of every attribute in single-task learning: what Δm on CelebA refers to.
CELEBA_STL: Mapping[str, float] = dict(
    zip(_CELEBA_STL.split()[::2], map(float, _CELEBA_STL.split()[1::2]), strict=True),
)

CELEBA_METRICS = tuple(Metric(attribute, higher=True, task=attribute) for attribute in CELEBA_STL)

CELEBA = Published(
    "MOON paper, table on CityScapes and CelebA; STL from FAMO's repository, issue 2",
    rows={"stl": CELEBA_STL},
    delta_m={
        "ls": 6.28,
        "rlw": 5.22,
        "dwa": 6.95,
        "uw": 5.78,
        "mgda": 10.93,
        "pcgrad": 6.65,
        "graddrop": 7.80,
        "cagrad": 6.20,
        "imtl-g": 4.67,
        "nash-mtl": 4.97,
        "famo": 4.72,
        "moon": 4.65,
    },
    reference="stl",
)

CELEBA_VIT = Published(
    "MOON paper, table on CelebA with a ViT backbone",
    rows={},
    delta_m={
        "mgda": 19.20,
        "pcgrad": 10.48,
        "cagrad": 12.61,
        "imtl-g": 7.96,
        "nash-mtl": 8.06,
        "famo": 7.75,
        "moon": 6.09,
    },
)
