"""The words of the problems.

Varied wording makes several tokens likely at every step, wrong ones too, as in real text.
"""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(" ".join(phrase.split()) for phrase in text.split("|"))


HERS = _words(
    """Ada Agnes Alice Alma Amy Anna Aria Bella Beth Carla Celia Clara Dana Daisy Diana Donna Edith Elena Ella Emma
    Erin Esther Eva Faye Fiona Flora Gemma Grace Greta Hannah Hazel Helen Holly Ida Irene Iris Ivy Jane Jenny Joan
    Julia Kara Kate Laura Leah Lena Lily Linda Lucy Lydia Mabel Maria Maya Mia Mina Molly Nadia Nina Nora Olga
    Olive Paula Pearl Petra Rita Rosa Ruth Sally Sara Selma Sofia Stella Susan Tara Tessa Tina Vera Wanda Yara Zoe"""
)
HIS = _words(
    """Aaron Abel Adam Alan Albert Alex Amir Andre Arthur Axel Ben Bert Boris Brian Bruno Carl Chris Colin Damon
    Daniel David Dean Dylan Eddie Edgar Emil Eric Ethan Felix Frank Fred Gavin George Glen Hans Harry Henry Hugo
    Ian Igor Isaac Ivan Jack James Jason Joel John Karl Kevin Kurt Lars Leo Levi Liam Louis Luke Marco Mark Martin
    Max Milo Nathan Neil Noah Oliver Omar Oscar Otto Owen Paul Peter Philip Ralph Ray Robin Roger Ryan Sam Simon
    Theo Tim Tom Victor Walter"""
)
THINGS = _words(
    """acorns apples arrows badges bagels balls bananas barrels baskets batteries beads beans bells berries biscuits
    blankets blocks boards bolts books bottles bowls boxes bricks brushes buckets bulbs buttons cakes candles
    candies cans cards carrots chairs cherries chips clips clocks coats coins combs cones cookies corks crates
    crayons cups cushions dates dolls eggs envelopes erasers feathers figs files flags flowers forks frames gems
    glasses gloves grapes hammers hats hooks jars jewels keys kites knives labels ladders lamps leaves lemons
    letters lids limes locks logs magnets maps marbles masks matches medals melons mirrors mugs nails napkins
    needles nuts olives onions oranges paints pans papers parcels peaches peanuts pearls pears pebbles pencils
    pens photos pictures pillows pins pipes plates plums postcards posters potatoes pots puzzles quilts radishes
    raisins ribbons rings robots rocks ropes rugs sacks sandwiches scarves screws seeds shells shirts shoes socks
    songs spoons stamps stars stickers stones straws tables tents tickets tiles tomatoes towels toys trays trees
    tulips turnips vases walnuts watches wheels whistles windows"""
)
KINDS = _words(
    """black blue brown cheap clean cracked dark empty fancy flat fresh golden green grey heavy large light little
    long new old orange pale pink plain pretty purple red rough round rusty sharp shiny short silver small smooth
    soft spare square striped thick thin tiny used warm white wooden yellow"""
)
PLACES = _phrases(
    """the attic|the bakery|the barn|the basement|the cabin|the castle|the cellar|the church|the classroom|
    the closet|the factory|the farm|the forest|the garage|the garden|the hall|the harbor|the hotel|the kitchen|
    the library|the market|the museum|the office|the park|the school|the shed|the shop|the station|the store|
    the studio|the theater|the village|the warehouse|the workshop"""
)
EVENTS = _phrases(
    """bought|found|received|collected|gathered|won|made|ordered|picked up|brought|added|got|borrowed|earned|
    bought another lot of|took"""
)
TIMES = _phrases(
    """On Monday|On Tuesday|On Wednesday|On Thursday|On Friday|On Saturday|On Sunday|In the morning|In the evening|
    In spring|In summer|In autumn|In winter|Last week|Yesterday|Later|After lunch|The next day|A week later|
    Before dinner|At noon|One day"""
)
