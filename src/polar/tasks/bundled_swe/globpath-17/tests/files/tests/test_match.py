import unittest

import globpath
from globpath import filter_paths, match


class TestSegments(unittest.TestCase):
    def test_star_stays_in_its_segment(self):
        self.assertTrue(match("src/*.py", "src/a.py"))
        self.assertFalse(match("src/*.py", "src/sub/a.py"))

    def test_question_mark(self):
        self.assertTrue(match("a?c", "abc"))
        self.assertFalse(match("a?c", "a/c"))

    def test_backslash(self):
        self.assertTrue(match("a\\*", "a*"))
        self.assertFalse(match("a\\*", "ab"))

    def test_ignore_case(self):
        self.assertTrue(match("*.TXT", "a.txt", ignore_case=True))
        self.assertFalse(match("*.TXT", "a.txt"))

    def test_filter_keeps_the_order(self):
        self.assertEqual(filter_paths("*.c", ["b.c", "a.h", "a.c"]), ["b.c", "a.c"])


class TestSets(unittest.TestCase):
    def test_set_and_range(self):
        self.assertTrue(match("[abc]-[0-9]", "b-7"))
        self.assertFalse(match("[abc]-[0-9]", "d-7"))

    def test_negated(self):
        self.assertTrue(match("[!a]b", "cb"))
        self.assertFalse(match("[!a]b", "ab"))

    def test_negated_never_matches_a_slash(self):
        self.assertFalse(match("a[!x]b", "a/b"))

    def test_range_never_matches_a_slash(self):
        self.assertFalse(match("a[.-0]b", "a/b"))
        self.assertTrue(match("a[.-0]b", "a.b"))

    def test_bracket_first_in_a_set(self):
        self.assertTrue(match("[]]x", "]x"))
        self.assertTrue(match("[!]]x", "ax"))
        self.assertFalse(match("[!]]x", "]x"))

    def test_caret_is_no_negation(self):
        self.assertTrue(match("[^a]", "^"))
        self.assertTrue(match("[^a]", "a"))
        self.assertFalse(match("[^a]", "b"))

    def test_no_end(self):
        with self.assertRaises(ValueError):
            globpath.compile_pattern("a[bc")


class TestDirectories(unittest.TestCase):
    def test_double_star_below(self):
        self.assertTrue(match("src/**", "src/a/b.py"))

    def test_double_star_in_the_middle(self):
        self.assertTrue(match("src/**/b.py", "src/x/y/b.py"))

    def test_double_star_may_be_no_directory(self):
        self.assertTrue(match("src/**/b.py", "src/b.py"))
        self.assertTrue(match("**/b.py", "b.py"))

    def test_double_star_takes_whole_directories(self):
        self.assertFalse(match("src/**/b.py", "src/xb.py"))
        self.assertFalse(match("**/b.py", "ab.py"))

    def test_double_star_within_a_segment_is_a_star(self):
        self.assertTrue(match("a**b", "axxb"))
        self.assertFalse(match("a**b", "a/b"))
        self.assertFalse(match("**b", "a/b"))
