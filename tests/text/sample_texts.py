"""Texts in many scripts, and the corpus that the small tokenizers are trained on."""

from __future__ import annotations

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind at all.",
    "def add(a, b):\n    return a + b  # 12345 + 67890\n\n\nprint(add(1, 2))\t# tab",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. Größe, naïve café, Ærøskøbing.",
    "Съешь ещё этих мягких французских булок, да выпей же чаю.",
    "我能吞下玻璃而不伤身体。漢字とひらがなとカタカナ。한국어도 있습니다.",
    "أنا قادر على أكل الزجاج و هذا لا يؤلمني. ฉันกินกระจกได้ แต่มันไม่ทำให้ฉันเจ็บ กำ",
    "😀👩‍👩‍👧 🇨🇿 e\u0301 ﬁ ½ ∑∫√ →",
] * 3

TEXTS = [
    "",
    "a",
    "Hello, my name is",
    "The dog doesn't mind.  Two  spaces,\n\nblank line, trailing ",
    "x = [i**2 for i in range(1000)]\n\tprint(x[12345])",
    "ďá 漢字 😀👩‍👩‍👧 กำ",
    "žluťoučký кот 我能 한국어 أنا",
    "NUL \x00 and control \x1b[0m, \ufeff BOM, \u00a0 no-break",
    "<s>markers</s> in <|im_start|>the text<|im_end|>",
    "e\u0301 ﬁ ½ \U00010348 \U0010ffff",
]

# Texts without the markers of special tokens, which SentencePiece tokenizers surround with spaces.
PLAIN_TEXTS = [text for text in TEXTS if "<" not in text]
