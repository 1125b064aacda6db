"""Made-up people: the 40 attributes of a face, drawn at random with the company that they keep in CelebA.

Shares are not CelebA's: rare attributes are less rare, so that a few hundred faces have all of them.
"""

from collections.abc import Mapping
from random import Random

HAIR_COLOURS = ("Black_Hair", "Blond_Hair", "Brown_Hair", "Gray_Hair")
BEARDS = {"5_o_Clock_Shadow": 0.35, "Goatee": 0.4, "Mustache": 0.45, "Sideburns": 0.45}

#: Shares of the hair colours, in their order; the rest has red hair, which is no attribute.
_OLD_HAIR = (0.2, 0.08, 0.12, 0.55)
_YOUNG_MEN = (0.45, 0.12, 0.33, 0.03)
_YOUNG_WOMEN = (0.3, 0.32, 0.28, 0.02)


def person(random: Random) -> dict[str, bool]:
    """The attributes of one made-up face, by name."""
    found = {"Male": random.random() < 0.45, "Young": random.random() < 0.65}
    for part in (_body, _hair, _beard, _fashion):
        found |= part(found, random)
    found |= _expression(random)
    found["Attractive"] = random.random() < _attraction(found)
    return found


def _body(known: Mapping[str, bool], random: Random) -> dict[str, bool]:
    def often(men: float, women: float, older: float = 1.0) -> bool:
        return random.random() < (men if known["Male"] else women) * (1 if known["Young"] else older)

    chubby = often(0.14, 0.09, older=1.8)
    big_nose = often(0.35, 0.15, older=1.4)
    return {
        "Chubby": chubby,
        "Double_Chin": random.random() < (0.65 if chubby else 0.05),
        "Oval_Face": not chubby and often(0.3, 0.5),
        "Big_Nose": big_nose,
        "Pointy_Nose": not big_nose and often(0.25, 0.45),
        "Big_Lips": often(0.2, 0.35),
        "Narrow_Eyes": often(0.2, 0.15),
        "Bags_Under_Eyes": often(0.2, 0.1, older=2.5),
        "Arched_Eyebrows": often(0.1, 0.45),
        "Bushy_Eyebrows": often(0.35, 0.07),
        "Pale_Skin": often(0.07, 0.14),
        "Blurry": random.random() < 0.07,
    }


def _hair(known: Mapping[str, bool], random: Random) -> dict[str, bool]:
    """Hats hide the hairline, so that who wears one is neither bald nor has bangs."""
    male, young = known["Male"], known["Young"]
    hat = random.random() < 0.1
    bald = male and not hat and random.random() < (0.12 if young else 0.3)
    found = dict.fromkeys((*HAIR_COLOURS, "Straight_Hair", "Wavy_Hair", "Bangs", "Receding_Hairline"), False)
    found |= {"Wearing_Hat": hat, "Bald": bald}
    if bald:
        return found
    shares = (_YOUNG_MEN if male else _YOUNG_WOMEN) if young else _OLD_HAIR
    colour = random.choices((*HAIR_COLOURS, None), (*shares, 1 - sum(shares)))[0]
    form = random.choices(("Straight_Hair", "Wavy_Hair", None), (0.5, 0.2, 0.3) if male else (0.35, 0.5, 0.15))[0]
    found |= {name: True for name in (colour, form) if name is not None}
    receding = male and not hat and random.random() < (0.12 if young else 0.45)
    bangs = not receding and not hat and random.random() < (0.12 if male else 0.35)
    return found | {"Receding_Hairline": receding, "Bangs": bangs}


def _beard(known: Mapping[str, bool], random: Random) -> dict[str, bool]:
    found = dict.fromkeys(BEARDS, False)
    if not known["Male"] or random.random() < 0.45:
        return found | {"No_Beard": True}
    while not any(found.values()):
        found = {name: random.random() < share for name, share in BEARDS.items()}
    return found | {"No_Beard": False}


def _fashion(known: Mapping[str, bool], random: Random) -> dict[str, bool]:
    male, young = known["Male"], known["Young"]
    makeup = not male and random.random() < (0.65 if young else 0.4)
    necktie = random.random() < (0.35 if male else 0.02)
    return {
        "Heavy_Makeup": makeup,
        "Wearing_Lipstick": random.random() < (0.9 if makeup else 0.01 if male else 0.35),
        "Rosy_Cheeks": random.random() < (0.4 if makeup else 0.04),
        "Eyeglasses": random.random() < (0.12 if young else 0.3),
        "Wearing_Earrings": random.random() < (0.04 if male else 0.45),
        "Wearing_Necktie": necktie,
        "Wearing_Necklace": not necktie and random.random() < (0.04 if male else 0.35),
    }


def _expression(random: Random) -> dict[str, bool]:
    smiling = random.random() < 0.5
    return {
        "Smiling": smiling,
        "Mouth_Slightly_Open": random.random() < (0.75 if smiling else 0.2),
        "High_Cheekbones": random.random() < (0.75 if smiling else 0.2),
    }


def _attraction(known: Mapping[str, bool]) -> float:
    praised = known["Young"] + known["Heavy_Makeup"] + known["Oval_Face"]
    return min(0.9, max(0.1, 0.3 + 0.25 * praised - 0.25 * (known["Chubby"] + known["Bags_Under_Eyes"] + known["Big_Nose"])))
