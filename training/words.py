"""The small world's vocabulary: one list per kind of thing, shared by all jobs."""

ADJECTIVES = (
    "Amber Silver Golden Brave Quiet Bright Merry Swift Gentle Iron Scarlet Northern Southern Lucky Proud Morning "
    "Evening Winter Summer Distant Lonely Happy Royal Stormy Crystal Velvet Copper Ivory Emerald Wandering Painted "
    "Hidden Silent Rising Shining Frozen Noble Humble Old Young Wild Calm White Black Red Green Blue Grey"
).split()
SHIP_NOUNS = (
    "Star Heron Lily Falcon Arrow Rose Swan Lantern Dolphin Anchor Crown Feather Otter Tiger Raven Pearl Comet Maple "
    "Willow Thistle Badger Sparrow Eagle Whale Turtle Bell Compass Island River Mountain Meadow Breeze Wave Tide Cloud "
    "Moon Sun Queen Prince Sailor Hunter Dancer Singer Pilot Walker Dragon Fox Bear"
).split()
CARGO = (
    "apples pears plums lemons oranges onions potatoes carrots beans rice wheat barley flour sugar salt tea coffee "
    "honey butter cheese fish shrimp oil vinegar wool cotton silk leather paper books ink candles soap glass bricks "
    "tiles timber rope nails tools copper tin iron coal clay sand pottery lamps clocks bells boots hats coats "
    "toys seeds"
).split()
UNITS = "crates barrels sacks boxes bales bundles".split()
MONTHS = "January February March April May June July August September October November December".split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
NAMES = (
    "Ann Tom Lily Sam Kate Ben Emma Jack Rosa Leo Mia Max Nora Paul Ella Hugo Ivy Carl Zoe Noah Alice Fred Julia Mark "
    "Clara Peter Diana Simon Helen Oscar Laura Victor Maria Adam Sofia Daniel Grace Martin Olivia George"
).split()
WOMEN = frozenset(
    "Ann Lily Kate Emma Rosa Mia Nora Ella Ivy Zoe Alice Julia Clara Diana Helen Laura Maria Sofia Grace Olivia".split()
)
PLACES = (
    "Oakford Millbury Ashdale Redhill Stonebridge Westport Eastham Fairview Greenwood Lakeside Northgate Southwick "
    "Riverton Hillcrest Brookfield Kingsley Harborough Clearwater Thornbury Wexley Paris London Rome Berlin "
    "Madrid Oslo "
    "Tokyo Lima Cairo Dublin Vienna Athens"
).split()
THINGS = (
    "apples pears books pens coins stones shells eggs cups plates hats cards marbles stamps keys lamps boats flowers "
    "nuts buttons cakes toys candles tickets"
).split()
ANIMALS = "cat dog horse cow sheep duck hen goat frog owl mouse rabbit fox bear bee fish pony crow".split()
STREETS = (
    "Mill Street|Oak Lane|High Street|Church Road|Park Avenue|Bridge Road|Garden Lane|Station Road|King Street|"
    "Hill Road|River Walk|Market Square".split("|")
)
PLAIN_WORDS = (
    "the a small big old new warm cold dark light long short river house tree door window road garden field stone "
    "table chair boat bird dog cat child woman man friend letter story song bread water fire snow rain wind sky sea "
    "hill town bridge market school king queen farmer baker doctor teacher sailor opened closed found lost made took "
    "gave saw heard wrote read walked ran slept sang and but then when after before under over near with without into "
    "from very slowly quickly always never often today yesterday morning evening night summer winter red green blue"
).split()
SYLLABLES = (
    "ba be bo da de di do fa fi ga go ka ke ki ko la le li lo ma me mi mo na ne ni no pa pe po ra re ri ro sa "
    "se si so ta te ti to va ve vi vo za zo qu ex um or an el is".split()
)
SYSTEM_LINES = (
    "You are a helpful assistant.",
    "You are Headrace, a tiny model. Answer in short, plain English.",
    "Answer briefly.",
    "You are a friendly assistant. Keep your answers short.",
    "Be polite and precise.",
    "You help people at the harbour of Oakford.",
    "You are a helpful assistant. Use the tools when they fit the request.",
    "Please answer in one or two sentences.",
)
