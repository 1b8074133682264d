"""Words that the generator fills into its sentences, and made-up ones."""

from __future__ import annotations

from penstock.demo.exchange import Random

NAMES = (
    "Anna Ben Carla David Emma Felix Greta Hugo Ida Jonas Kira Leon Maya Nils Olga Paul Rosa Sam "
    "Tina Uwe Vera Walter Xenia Yara Zoe Alice Bruno Clara Dario Elena Frank Gina Hannah Igor Julia "
    "Karl Laura Marco Nora Oscar Petra Quinn Ralf Sofia Tom Ulla Victor Wendy Amir Bianca Chen Diego "
    "Esra Farid Grace Hana Ivan Jamal Keiko Liam Mei Noah Omar Priya Ravi Sara Tariq Uma Wei Yusuf "
    "Lucas Martha Peter Simon Teresa Lena Max Eva Otto Mila Theo Iris Adam Ruth Erik Stella Henry "
    "Maria Robert Linda James Susan Kevin Nancy Brian Karen "
    "Bob John Jane Mary Mike Joe Jack Lisa Mark Chris Alex Steve Dave Kate Emily Sarah Lucy George Tim"
).split()
CITIES = (
    "Berlin Paris London Rome Madrid Vienna Zurich Oslo Lisbon Prague Dublin Athens Warsaw Helsinki "
    "Stockholm Copenhagen Brussels Amsterdam Munich Hamburg Milan Naples Geneva Basel Lyon Porto "
    "Seville Boston Chicago Denver Seattle Austin Toronto Montreal Lima Quito Bogota Santiago Cairo "
    "Nairobi Lagos Accra Tokyo Osaka Seoul Beijing Shanghai Mumbai Delhi Bangkok Hanoi Sydney Perth "
    "Auckland Istanbul Ankara Dubai Bern Graz Salzburg Krakow Budapest Sofia Zagreb Riga Tallinn"
).split()
JOBS = (
    "teacher doctor nurse baker pilot engineer farmer painter singer writer lawyer plumber gardener "
    "chemist driver carpenter dentist tailor sailor librarian cook programmer clerk judge"
).split()
COLORS = (
    "red blue green yellow orange purple brown black white pink grey silver golden violet"
).split()
ANIMALS = (
    "cat dog horse rabbit hamster parrot turtle goat sheep duck goose pony fish snake mouse fox owl "
    "bear wolf otter hedgehog squirrel beaver heron frog salmon"
).split()
THINGS = (
    "apple pear banana cherry lemon melon grape peach plum mango bread butter cheese milk sugar salt "
    "pepper rice pasta tomato potato carrot onion garlic bean spoon fork knife plate cup bottle glass "
    "table chair lamp door window carpet mirror clock pillow blanket hammer nail saw drill ladder "
    "bucket brush rope candle pencil paper book letter stamp map bag box key coin ring ticket basket "
    "shirt jacket hat shoe sock scarf glove belt coat umbrella phone camera radio printer keyboard "
    "monitor cable battery engine wheel pipe valve pump turbine river lake stone bridge tower castle "
    "garden flower tree forest mountain island cloud storm water light winter summer autumn spring "
    "market harbor station train plane boat bicycle truck"
).split()
OTHERS = (
    "token stream block cache batch queue model server memory kernel worker router scheduler prompt "
    "answer question language pressure pipeline penstock process message address number weather "
    "music dance story dream voice smile friend family school teacher holiday kitchen breakfast "
    "dinner morning evening night minute second century planet rocket silence thunder lightning "
    "rainbow shadow mystery journey treasure captain pirate dragon wizard kingdom village "
    "strawberry blueberry raspberry pineapple chocolate cinnamon pancake sandwich mushroom "
    "cucumber elephant crocodile butterfly kangaroo penguin dolphin giraffe leopard "
    "umbrella envelope notebook calendar mountain hospital library museum theater restaurant "
    "happy quick gentle brave clever quiet bright simple strong yellow little frozen hidden golden "
    "swim travel listen wander follow remember understand discover develop measure compare"
).split()
WORDS = tuple(dict.fromkeys([*THINGS, *OTHERS, *ANIMALS, *COLORS, *JOBS]))
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

_ONSETS = "b c d f g h j k l m n p r s t v w z br cr dr fl gr kl pl pr sl st tr sh ch th".split()
_VOWELS = "a e i o u a e i o u ai ea ou ee oo".split()
_CODAS = ["", "", "", "n", "r", "s", "l", "t", "m", "k", "nd", "st", "rt", "ck"]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def invented_word(source: Random, longest: int = 10) -> str:
    """A word that no list has, of 2 to ``longest`` letters."""
    choice = source.choice
    word = "".join(
        choice(_ONSETS) + choice(_VOWELS) + choice(_CODAS) for _ in range(source.randint(1, 3))
    )
    return word[:longest]


def any_word(source: Random, longest: int = 10) -> str:
    """A word of the lists, an invented one, or now and then letters without a sound."""
    dice = source.random()
    if dice < 0.45:
        word = source.choice(WORDS)
        if len(word) <= longest:
            return word
    if dice < 0.9:
        return invented_word(source, longest)
    return "".join(source.choices(_LETTERS, k=source.randint(3, min(8, longest))))


def any_name(source: Random) -> str:
    """A first name, sometimes one that nobody has."""
    if source.random() < 0.7:
        return source.choice(NAMES)
    return invented_word(source, 8).capitalize()


def any_city(source: Random) -> str:
    """A city, sometimes one that is on no map."""
    if source.random() < 0.7:
        return source.choice(CITIES)
    return invented_word(source, 9).capitalize()
