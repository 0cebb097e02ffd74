"""Prompts from a built-in word list: any length, no download, deterministic by seed."""

from __future__ import annotations

from random import Random

TOKENS_PER_WORD = 1.1
"""Estimate: one token per word and one per full stop, as in vocabularies of 50,000 entries or more (SmolLM2: 1.09)."""

WORDS = tuple(
    """
    able about above across after again air all along also always among animal answer area arm around ask away back
    ball bank base bear beautiful bed before begin behind best better between big bird black blue boat body book
    both bottom box boy bread bring brother brown build burn busy call came camp car care carry case catch center
    chair change child church city class clean clear climb clock close cloud coast cold color come common cook cool
    copy corn corner cost country course cover cross dance dark daughter day deep desert different direct distant
    door down draw dream dress drink drive dry early earth east eat edge egg empty end engine enough evening every
    example eye face fact fall family famous farm fast father feel field fight fill find fine finger fire fish floor
    flower fly follow food foot forest form four free fresh friend front fruit full game garden gave girl give glass
    gold good grand grass great green ground group grow hand happy hard hat head hear heart heavy help here high
    hill history hold hole home horse hot hour house hundred ice idea inside iron island job join jump keep key king
    kitchen lake land language large last laugh law lead learn leave left leg letter life light line list listen
    little long lost love low machine make many map mark market master material meet metal middle mile milk mind
    minute money month moon morning mother mountain mouth move music name near neck never night north nose note
    number ocean office often oil old open orange order other paint pair paper park part party past path pay people
    perhaps person picture piece place plain plan plane plant play point poor port power press problem product
    public pull push queen question quick quiet race rain reach ready real record red rest rich ride right ring
    river road rock roll room root rope round rule run safe sail salt sand school science sea season second seed
    sell send serve seven shape ship shirt shop short shoulder show side silver simple sing sister skin sky sleep
    small smile snow soft soil song soon south space speak spell spring square stand star start station stay steel
    step stone stop store story strange stream street strong student sugar summer sun sure surface table talk tall
    teacher team temperature thin thing think thousand three tiny together tone tool top town train travel tree true
    turn twenty under unit valley village visit voice wait walk wall war warm wash watch water wave way wear weather
    week west wheel white wide wild wind window winter wish woman wonder wood word work world write yard year yellow
    young
    """.split()
)

_SENTENCE_WORDS = (8, 14)


def random_text(random: Random, num_tokens: int) -> str:
    """Sentences of random words, about `num_tokens` tokens."""
    left = max(1, round(num_tokens / TOKENS_PER_WORD))
    sentences = []
    while left:
        length = min(left, random.randint(*_SENTENCE_WORDS))
        sentences.append(" ".join(random.choices(WORDS, k=length)).capitalize() + ".")
        left -= length
    return " ".join(sentences)
