"""Cues of questions and messages: a file for each language, all of one shape, each of which works on real sentences."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from tersely.domain.search import cues
from tersely.domain.search.cues import PREFERENCE, TALK, is_about_own, is_about_replies, is_about_whole, looks_back
from tersely.domain.search.terms import tokenize

FILES = {each.name: each for each in files("tersely.data").joinpath("cues").iterdir() if each.name.endswith(".json")}

PREFERENCES = {
    "en": ["Always format code with two spaces when I ask for an example.", "I prefer short answers."],
    "de": [
        "Gib die Beispiele immer mit zwei Leerzeichen aus, wenn ich dich nach Code frage.",
        "Ich bevorzuge kurze Antworten.",
        "Mir wäre eine Tabelle lieber.",
        "Ich möchte zusätzliche Abhängigkeiten vermeiden.",
    ],
    "fr": [
        "Indique toujours les versions quand je te demande une bibliothèque.",
        "Je préfère les réponses courtes.",
        "J'aime que les exemples soient complets.",
        "Je voudrais éviter les dépendances inutiles.",
    ],
    "es": [
        "Incluye siempre las versiones cuando te pregunte por una biblioteca.",
        "Prefiero respuestas cortas.",
        "Me gusta que los ejemplos sean completos.",
        "Quiero evitar dependencias innecesarias.",
    ],
}
NO_PREFERENCES = [
    "The parser fails on empty files.",
    "Der Parser scheitert an leeren Dateien.",
    "L'analyseur échoue sur les fichiers vides.",
    "El analizador falla con archivos vacíos.",
]
LOOKING_BACK = {
    "en": ["What did we decide about the cache?", "Was the cache cleared?"],
    "de": [
        "Was haben wir über den Cache beschlossen?",
        "Wann war mein Termin beim Zahnarzt?",
        "Wo waren wir im Urlaub?",
        "Waren wir schon in Rom?",
    ],
    "fr": ["Qu'est-ce que nous avons décidé pour le cache ?", "De quoi parlait notre discussion sur le cache ?"],
    "es": [
        "¿Qué hablamos sobre la caché?",
        "¿Cuándo fue mi cita con el dentista?",
        "¿Qué pone en la pregunta anterior?",
    ],
}
LOOKING_AHEAD = [
    "Write a function that sorts names.",
    "When is the youth center putting on a talent show?",
    "Schreibe eine Funktion, die Namen sortiert.",
    "Écris une fonction qui trie des noms.",
    "Escribe una función que ordene nombres.",
    "Where is the anterior cruciate ligament?",
    "Was kosten die Waren?",
]
WHOLE = {
    "en": ["In which order did I bring up the topics?", "Summarize how our project developed."],
    "de": [
        "In welcher Reihenfolge habe ich die Themen angesprochen?",
        "Fasse unser Projekt zusammen.",
        "Fass bitte zusammen, wie sich mein Projekt entwickelt hat.",
        "Gib mir eine Zusammenfassung unseres Gesprächs.",
        "Wie hat sich mein Umgang mit Fehlern im Lauf der Zeit verändert?",
    ],
    "fr": [
        "Dans quel ordre ai-je abordé les sujets ?",
        "Résume comment notre projet a avancé.",
        "Peux-tu me faire un résumé de nos conversations sur le budget ?",
        "Comment mon approche des tests a-t-elle évolué ?",
        "Fais un résumé de tout ce que je t'ai demandé.",
    ],
    "es": [
        "¿En qué orden mencioné los temas?",
        "Resume cómo avanzó nuestro proyecto.",
        "Resume todo lo que he escrito.",
        "Resume mi plan de pruebas.",
        "¿Puedes darme un resumen de nuestras conversaciones?",
        "¿Cómo ha evolucionado mi plan de pruebas?",
    ],
}
PARTS = [
    "Which database did we choose?",
    "Welche Datenbank haben wir gewählt?",
    "Quelle base de données avons-nous choisie ?",
    "¿Qué base de datos elegimos?",
    "When did Tom resume his training after he was ill?",
    "Does the upload resume where he stopped?",
    "Does the race resume after 5 mi?",
    "Which employer is on the resume he sent?",
    "Update the résumé and add a comment about Acme",
    "Send the résumé before the session on Friday",
]
OWN = {
    "en": ["When is my dentist appointment?"],
    "de": ["Wann ist mein Termin?", "Wie viele Bücher habe ich gelesen?"],
    "fr": [
        "Quand est mon rendez-vous ?",
        "Combien de livres ai-je lus, moi ?",
        "Combien de livres j'ai lus ?",
        "Où sont mes amis ?",
    ],
    "es": ["¿Cuándo es mi cita?", "¿Qué dije sobre el presupuesto?", "¿Qué compré yo?"],
}
NOT_OWN = [
    "When did Maria meet Jean?",
    "Is the MA program 5 mi away, with a 3 yo?",
    "Wann traf Maria Jean?",
    "Quand Maria a-t-elle rencontré Jean ?",
    "¿Cuándo conoció María a Juan?",
    "¿Qué ciudad visitó Ana el mes pasado?",
    "¿Cuántos días tiene un mes?",
    "¿Quién llegó un mes antes?",
    "Where is the mi unit used?",
    "How does yo-yo work",
    "Which letters were mis-sent?",
]
REPLIES = {
    "en": ["What did you recommend for my cache?"],
    "de": [
        "Was hast du mir für meinen Cache empfohlen?",
        "Was war deine Empfehlung?",
        "Nenne mir, was du vorgeschlagen hast.",
    ],
    "fr": [
        "Que m'as-tu conseillé pour mon cache ?",
        "Quelles étaient tes recommandations ?",
        "Ce que tu m'as proposé ?",
    ],
    "es": ["¿Qué me recomendaste para mi caché?", "¿Qué has sugerido?", "¿Cuáles fueron tus recomendaciones?"],
}


def of_all(sentences: dict[str, list[str]]) -> list[str]:
    assert {f"{language}.json" for language in sentences} == FILES.keys()
    return [sentence for each in sentences.values() for sentence in each]


def is_preference(text: str) -> bool:
    return PREFERENCE in cues.marks_of(text, len(tokenize(text)), is_users=True, speaker="")


@pytest.mark.parametrize("name", FILES)
def test_every_language_has_the_same_cues(name: str) -> None:
    found = json.loads(FILES[name].read_text(encoding="utf-8"))
    assert list(found) == list(json.loads(FILES["en.json"].read_text(encoding="utf-8")))
    assert all(found.values())
    assert all(tokenize(word) for word in found["talk"])


@pytest.mark.parametrize("text", of_all(PREFERENCES))
def test_preferences_are_marked_whatever_their_case(text: str) -> None:
    assert is_preference(text)
    assert is_preference(text.upper())


@pytest.mark.parametrize("name", FILES)
def test_patterns_of_preferences_are_in_lower_case(name: str) -> None:
    patterns: list[str] = json.loads(FILES[name].read_bytes())["preferences"]
    assert [pattern for pattern in patterns if pattern != pattern.lower()] == []


@pytest.mark.parametrize("text", of_all(LOOKING_BACK))
def test_questions_about_the_past_look_back(text: str) -> None:
    assert looks_back(text)


@pytest.mark.parametrize("text", of_all(WHOLE))
def test_questions_about_the_whole_are_recognised(text: str) -> None:
    assert is_about_whole(text)


@pytest.mark.parametrize("text", of_all(OWN))
def test_questions_in_the_first_person_are_about_the_users_words(text: str) -> None:
    assert is_about_own(text)


@pytest.mark.parametrize("text", of_all(REPLIES))
def test_questions_about_replies_are_recognised(text: str) -> None:
    assert is_about_replies(text)
    assert not is_about_own(text)


@pytest.mark.parametrize(
    "word", ["summary", "Zusammenfassung", "Gespräch", "résumer", "mentionné", "resumen", "conversación"]
)
def test_words_about_the_talk_are_known(word: str) -> None:
    assert TALK.issuperset(tokenize(word))


def test_words_of_other_subjects_are_not_about_the_talk() -> None:
    assert TALK.isdisjoint(tokenize("How did the ensemble model perform?"))


def test_other_sentences_have_no_cues() -> None:
    assert [text for text in NO_PREFERENCES if is_preference(text)] == []
    assert [text for text in LOOKING_AHEAD if looks_back(text)] == []
    assert [text for text in PARTS if is_about_whole(text) or is_about_replies(text)] == []
    assert [text for text in NOT_OWN if is_about_own(text)] == []
