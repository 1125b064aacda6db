"""Drawing a face that shows its 40 attributes: one function for each part, from behind to the front.

Eyes, nose and mouth have about the places that they have in CelebA. Colours that no attribute says are drawn at random.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random

from PIL import Image, ImageFilter

from moonopt.bench.data.faces_canvas import MIDDLE, Canvas, Colour, Point, at, both_sides, mixed, varied

EYES, NOSE, MOUTH, CHIN, TOP = 108.0, 132.0, 150.0, 172.0, 52.0  # heights, from the upper edge
EYE_DISTANCE = 19.0  # of each eye from the middle
BLUR = 3.5  # pixels

HAIR: Mapping[str, Colour] = {
    "Black_Hair": (30, 26, 28),
    "Blond_Hair": (226, 192, 106),
    "Brown_Hair": (104, 64, 34),
    "Gray_Hair": (172, 172, 178),
}
RED_HAIR: Colour = (172, 72, 34)
SKIN: Sequence[Colour] = ((226, 176, 144), (204, 148, 112), (160, 108, 78), (214, 160, 128))
PALE_SKIN: Colour = (252, 236, 228)
SHADE: Colour = (110, 50, 30)  # what is mixed into skin that lies in the dark
CLOTHES: Sequence[Colour] = ((52, 70, 110), (120, 40, 50), (60, 100, 70), (90, 90, 96), (150, 120, 60), (110, 70, 130))
HATS: Sequence[Colour] = ((40, 60, 120), (140, 30, 40), (210, 190, 140), (50, 50, 54))
LIPSTICK: Colour = (196, 18, 52)
GOLD: Colour = (250, 208, 50)
WHITE: Colour = (250, 250, 248)
BLACK: Colour = (20, 18, 20)


class Face(Canvas):
    """A canvas, and what all parts of the face on it need to know."""

    def __init__(self, attributes: Mapping[str, bool], random: Random) -> None:
        super().__init__()
        self.attributes, self.random = attributes, random
        colours = [colour for name, colour in HAIR.items() if attributes[name]]
        self.skin = varied(PALE_SKIN if attributes["Pale_Skin"] else random.choice(SKIN), random, 6)
        self.hair = varied(colours[0] if colours else RED_HAIR, random, 8)
        self.bald = attributes["Bald"]
        self.long_hair = not self.bald and random.random() < (0.06 if attributes["Male"] else 0.85)
        self.half_width = 44.0 + 7 * attributes["Chubby"] - 5 * attributes["Oval_Face"]

    def has(self, name: str) -> bool:
        return self.attributes[name]

    def shaded(self, share: float) -> Colour:
        """The skin, in the dark."""
        return mixed(self.skin, SHADE, share)

    def outline(self, larger: float = 0.0) -> list[Point]:
        """The edge of the face, clockwise from the right; men's jaws are squarer, chubby cheeks fuller, oval faces longer."""
        fullness = (2.7 if self.has("Male") else 2.15) + 0.8 * self.has("Chubby") - 0.25 * self.has("Oval_Face")
        half_height = (CHIN - TOP) / 2 + 4 * self.has("Oval_Face") + larger
        points = []
        for step in range(72):
            angle = math.pi * step / 36
            power = 2 / (fullness if math.sin(angle) > 0 else 2.2)
            across, down = (math.copysign(abs(value) ** power, value) for value in (math.cos(angle), math.sin(angle)))
            points.append((MIDDLE + (self.half_width + larger) * across, (TOP + CHIN) / 2 + half_height * down))
        return points


def draw(attributes: Mapping[str, bool], random: Random) -> Image.Image:
    """A picture of a face with these attributes."""
    face = Face(attributes, random)
    for part in PARTS:
        part(face)
    picture = face.finished(random)
    return picture.filter(ImageFilter.GaussianBlur(BLUR)) if attributes["Blurry"] else picture


def _back_hair(face: Face) -> None:
    if not face.long_hair:
        return
    colour, strands, half = mixed(face.hair, BLACK, 0.15), mixed(face.hair, BLACK, 0.45), face.half_width + 11
    wave = 4.5 * face.has("Wavy_Hair")
    edge = [(half + wave * math.sin(1.15 * step) + 0.15 * step, 90 + 4.6 * step) for step in range(25)]
    face.ellipse((MIDDLE, 94), half, 52, colour)
    face.polygon(both_sides(edge), colour)
    for side in (-1, 1):
        for inwards in (2.5, 6, 9.5):
            if face.has("Straight_Hair"):
                face.line([at(side, half - inwards, 95), at(side, half - inwards + 2, 200)], strands, 0.9)
            if face.has("Wavy_Hair"):
                face.line([at(side, x - inwards, y) for x, y in edge], strands, 0.9)


def _shoulders(face: Face) -> None:
    half, neck = (74.0, 25.0) if face.has("Male") else (60.0, 17.0)
    face.polygon(
        both_sides([(half, 250), (half, 230), (half - 8, 199), (neck, 190)]), varied(_one_of(face, CLOTHES), face.random, 12)
    )
    face.polygon(both_sides([(0, 206), (neck, 193), (neck, 150)]), face.shaded(0.22))
    if face.has("Wearing_Necktie"):
        _necktie(face, neck)
    if face.has("Wearing_Necklace"):
        for step in range(13):
            angle = math.pi * step / 12
            face.ellipse((MIDDLE + (neck + 1) * math.cos(angle), 190 + 17 * math.sin(angle)), 2.6, 2.6, GOLD)
    if face.has("Double_Chin"):
        half = face.half_width * 0.72
        face.ellipse((MIDDLE, 172), half, 15, face.shaded(0.1))
        face.curve(at(-1, half - 3, 177), (MIDDLE, 198), at(1, half - 3, 177), mixed(face.skin, BLACK, 0.5), 1.6)


def _necktie(face: Face, neck: float) -> None:
    colour = _one_of(face, ((170, 20, 30), (30, 50, 140), (20, 100, 60)))
    for side in (-1, 1):
        face.polygon([at(side, neck, 187), at(side, 0, 206), at(side, 20, 230), at(side, neck + 12, 200)], WHITE)
    face.polygon(both_sides([(5, 206), (7, 196)]), mixed(colour, BLACK, 0.25))
    face.polygon(both_sides([(12, 250), (11, 232), (5, 206)]), colour)


def _head(face: Face) -> None:
    for side in (-1, 1):
        face.ellipse(at(side, face.half_width, 116), 6, 11, face.shaded(0.2))
    face.polygon(face.outline(0.8), face.shaded(0.2))
    face.polygon(face.outline(), face.skin)
    if face.bald:
        face.ellipse(at(-1, 12, 64), 13, 6, mixed(face.skin, WHITE, 0.55))


def _cheeks(face: Face) -> None:
    for side in (-1, 1):
        if face.has("Rosy_Cheeks"):
            for size, share in ((11, 0.3), (8.5, 0.5), (6, 0.65)):
                face.ellipse(at(side, 27, 136), size, size * 0.8, mixed(face.skin, (244, 70, 90), share))
        if face.has("High_Cheekbones"):
            outside, light = face.half_width - 5, mixed(face.skin, WHITE, 0.6)
            face.curve(at(side, outside, 127), at(side, 30, 131), at(side, 24, 146), face.shaded(0.45), 2.2)
            face.curve(at(side, outside, 122), at(side, 32, 127), at(side, 25, 126), light, 3)


def _age(face: Face) -> None:
    if face.has("Young"):
        return
    colour = mixed(face.skin, (80, 40, 30), 0.5)
    for y in (80, 86, 92):
        face.curve(at(-1, 22, y), (MIDDLE, y - 4), at(1, 22, y), colour, 1.3)
    for side in (-1, 1):
        face.curve(at(side, 11, 133), at(side, 23, 140), at(side, 25, 156), colour, 1.5)
        for rise in (-4, 0, 4):
            face.line([at(side, 31, EYES + rise / 2), at(side, 38, EYES + rise)], colour, 1.1)


def _beard(face: Face) -> None:
    colour = mixed((70, 50, 40) if face.bald else face.hair, BLACK, 0.25)
    if face.has("5_o_Clock_Shadow"):
        _stubble(face)
    if face.has("Sideburns"):
        outside = face.half_width
        for side in (-1, 1):
            strip = [(outside, 98), (outside - 8, 98), (outside - 9, 142), (outside - 3, 140)]
            face.polygon([at(side, x, y) for x, y in strip], colour)
    if face.has("Goatee"):
        face.ellipse((MIDDLE, 168), 15, 11, colour)
        face.polygon(both_sides([(4, 158), (6, 168)]), colour)
    if face.has("Mustache"):
        face.polygon(both_sides([(0, 145), (10, 147), (22, 148), (11, 139), (0, 139)]), colour)


def _stubble(face: Face) -> None:
    jaw = [(MIDDLE + 0.97 * (x - MIDDLE), y - 1) for x, y in face.outline() if y > 134]
    face.polygon(jaw, mixed(face.skin, (70, 74, 84), 0.38))
    half = max(x for x, _ in jaw) - MIDDLE - 6
    for _ in range(220):
        x, y = face.random.uniform(-half, half), face.random.uniform(138, CHIN - 2)
        if abs(x) < half * math.sqrt(1 - ((y - 134) / 38) ** 2):
            face.ellipse(at(1, x, y), 0.6, 0.6, mixed(face.skin, BLACK, 0.65))


def _eyes(face: Face) -> None:
    """Attractive people have large pupils in which a light shines; women have lashes."""
    height = 2.3 if face.has("Narrow_Eyes") else 6.0
    iris = _one_of(face, ((70, 110, 150), (90, 60, 36), (70, 110, 70)))
    shadow = _one_of(face, ((122, 60, 160), (60, 90, 180), (40, 130, 130)))
    size = 5.2 if face.has("Attractive") else 3.9
    lid = 2.4 if face.has("Heavy_Makeup") else 1.2
    for side in (-1, 1):
        x, y = at(side, EYE_DISTANCE, EYES)
        if face.has("Bags_Under_Eyes"):
            face.ellipse((x, y + 9), 11, 5.5, mixed(face.skin, (84, 48, 96), 0.5))
            face.ellipse((x, y + 6.5), 11, 4, face.skin)
        if face.has("Heavy_Makeup"):
            face.ellipse((x, y - 4), 13, 8.5, mixed(face.skin, shadow, 0.75))
        face.ellipse((x, y), 10, height, WHITE)
        face.ellipse((x, y), size, min(size, height), iris)
        face.ellipse((x, y), size / 2, min(size / 2, height), BLACK)
        if face.has("Attractive"):
            face.ellipse((x - 1.8, y - min(2, height / 2)), 1.8, min(1.8, height / 2), WHITE)
        face.curve((x - 10, y), (x, y - 2 * height), (x + 10, y), BLACK, lid)
        if not face.has("Male"):
            face.line([(x + side * 9, y - 1), (x + side * 14, y - 5)], BLACK, lid)


def _eyebrows(face: Face) -> None:
    colour = mixed((80, 60, 50) if face.bald else face.hair, BLACK, 0.45)
    thick = 6.5 if face.has("Bushy_Eyebrows") else 2.4
    y = EYES - 11
    rise = 13.0 if face.has("Arched_Eyebrows") else 1.5
    for side in (-1, 1):
        face.curve(at(side, 8, y), at(side, 23, y - rise), at(side, 31, y), colour, thick)


def _nose(face: Face) -> None:
    dark = face.shaded(0.6)
    half = 13.0 if face.has("Big_Nose") else 7.0
    if face.has("Pointy_Nose"):
        face.polygon([at(-1, 2, EYES + 4), at(1, half, NOSE - 1), (MIDDLE, NOSE + 6)], face.shaded(0.35))
        face.line([at(-1, 3, EYES + 4), at(-1, half, NOSE - 2), (MIDDLE, NOSE + 6), at(1, half, NOSE - 2)], dark, 2.2)
    else:
        face.ellipse((MIDDLE, NOSE - 3), half, half * 0.62, mixed(face.skin, (200, 90, 70), 0.18))
        face.line([at(-1, 4, EYES + 5), at(-1, 5, NOSE - 8)], dark, 1.2)
        face.curve(at(-1, half, NOSE - 2), (MIDDLE, NOSE + 8), at(1, half, NOSE - 2), dark, 1.7)
    for side in (-1, 1):
        face.ellipse(at(side, half / 2, NOSE + 0.5), half * 0.2, 1.2, mixed(dark, BLACK, 0.5))


def _mouth(face: Face) -> None:
    smiling = face.has("Smiling")
    half, bend, middle = (22.0, 9.0, MOUTH + 4) if smiling else (16.0, -1.5, MOUTH)  # bend: of the corners, upwards
    gap = 7.0 if face.has("Mouth_Slightly_Open") else 0.0
    lip = 6.5 if face.has("Big_Lips") else 2.8
    colour = LIPSTICK if face.has("Wearing_Lipstick") else mixed(face.skin, (140, 30, 50), 0.6)

    def edge(offset: float) -> list[Point]:
        steps = [step / 10 for step in range(-10, 11)]
        return [(MIDDLE + half * step, middle - bend * step**2 + offset * (1 - step**2)) for step in steps]

    face.polygon([*edge(-lip), *reversed(edge(gap + 1.25 * lip))], colour)
    if gap:
        face.polygon([*edge(0), *reversed(edge(gap))], (80, 16, 24))
        face.polygon([*edge(0), *reversed(edge(0.55 * gap))], WHITE)
    else:
        face.line(edge(0), mixed(colour, BLACK, 0.55), 1.3)


def _front_hair(face: Face) -> None:
    if face.bald:
        return
    receding = face.has("Receding_Hairline")
    low, wave = (66 if receding else 78), 3 * face.has("Wavy_Hair")
    hairline = []
    for step in range(-12, 13):
        x = step / 12
        temples = 12 * math.exp(-(((abs(x) - 0.55) / 0.25) ** 2)) if receding else 0
        y = low + (110 - low) * abs(x) ** 5 - temples + wave * math.sin(1.5 * step)
        hairline.append((MIDDLE + (face.half_width - 1) * x, y))
    outside = [point for point in face.outline(7) if point[1] < 104]
    face.polygon([*outside, *reversed(hairline)], face.hair)
    if face.has("Bangs"):
        half = 0.9 * face.half_width
        fringe = [(MIDDLE + half * step / 10, 97 + (3 if step % 2 else -2)) for step in range(-10, 11)]
        face.polygon([at(-1, half, 74), (MIDDLE, 64), at(1, half, 74), *reversed(fringe)], face.hair)
    _strands(face)


def _strands(face: Face) -> None:
    """Lines in the hair on top: straight ones, waves, or none."""
    dark = sum(face.hair) < 150
    colour = mixed(face.hair, WHITE if dark else BLACK, 0.25 if dark else 0.35)
    for step in range(-5, 6):
        (x, y), (right, down) = (2.5 * step, 48 + 0.35 * step**2), (4.7 * step, 15 + 0.55 * step**2)
        if face.has("Straight_Hair"):
            face.line([at(1, x, y), at(1, x + right, y + down)], colour, 1)
        if face.has("Wavy_Hair"):
            shares = [turn / 10 for turn in range(11)]
            face.line([at(1, x + share * right + 2 * math.sin(9 * share), y + share * down) for share in shares], colour, 1)


def _eyeglasses(face: Face) -> None:
    if not face.has("Eyeglasses"):
        return
    frame = _one_of(face, (BLACK, (90, 40, 20), (30, 30, 90)))
    for side in (-1, 1):
        face.ring(at(side, EYE_DISTANCE + 0.5, EYES + 1), 15.5, 12.5, frame, 2.8)
        face.line([at(side, EYE_DISTANCE + 15.5, EYES - 2), at(side, face.half_width + 2, EYES - 6)], frame, 2.8)
    face.curve(at(-1, 5, EYES), (MIDDLE, EYES - 5), at(1, 5, EYES), frame, 2.8)


def _hat(face: Face) -> None:
    if not face.has("Wearing_Hat"):
        return
    colour = varied(_one_of(face, HATS), face.random, 12)
    half = face.half_width + 6
    face.polygon(both_sides([(half, 74), (0.85 * half, 34), (0.5 * half, 24)]), colour)
    face.polygon(both_sides([(half, 72), (half, 60)]), mixed(colour, BLACK, 0.5))
    face.ellipse((MIDDLE, 75), half + 18, 7, mixed(colour, BLACK, 0.2))


def _earrings(face: Face) -> None:
    if not face.has("Wearing_Earrings"):
        return
    for side in (-1, 1):
        face.ellipse(at(side, face.half_width + 3, 129), 3, 3, GOLD)
        face.ring(at(side, face.half_width + 3, 138), 5.5, 8, GOLD, 2.4)


def _one_of(face: Face, colours: Sequence[Colour]) -> Colour:
    return face.random.choice(colours)


#: From behind to the front.
PARTS: Sequence[Callable[[Face], None]] = (
    _back_hair,
    _shoulders,
    _head,
    _cheeks,
    _age,
    _beard,
    _eyes,
    _eyebrows,
    _nose,
    _mouth,
    _front_hair,
    _eyeglasses,
    _hat,
    _earrings,
)
