import unittest

from hooks import Emitter


class TestEmitter(unittest.TestCase):
    def setUp(self):
        self.emitter = Emitter()
        self.seen = []

    def test_order_and_results(self):
        self.emitter.on("x", lambda n: n + 1)
        self.emitter.on("x", lambda n: n * 2)
        self.assertEqual(self.emitter.emit("x", 5), [6, 10])

    def test_priority(self):
        self.emitter.on("x", lambda: "low")
        self.emitter.on("x", lambda: "high", priority=5)
        self.assertEqual(self.emitter.emit("x"), ["high", "low"])

    def test_off(self):
        def listener():
            self.seen.append(1)

        self.emitter.on("x", listener)
        self.assertTrue(self.emitter.off("x", listener))
        self.assertFalse(self.emitter.off("x", listener))
        self.emitter.emit("x")
        self.assertEqual(self.seen, [])

    def test_once(self):
        self.emitter.once("x", lambda: self.seen.append(1))
        self.emitter.emit("x")
        self.emitter.emit("x")
        self.assertEqual(self.seen, [1])
        self.assertEqual(self.emitter.count("x"), 0)

    def test_unknown_event(self):
        self.assertEqual(self.emitter.emit("nothing"), [])

    def test_an_exception_ends_it(self):
        def broken():
            raise KeyError("x")

        self.emitter.on("x", broken)
        self.emitter.on("x", lambda: self.seen.append(1))
        with self.assertRaises(KeyError):
            self.emitter.emit("x")
        self.assertEqual(self.seen, [])


class TestChangesWhileEmitting(unittest.TestCase):
    def setUp(self):
        self.emitter = Emitter()
        self.seen = []

    def note(self, what):
        return lambda: self.seen.append(what)

    def method(self):
        self.seen.append("method")

    def test_once_skips_nobody(self):
        for name in "abc":
            self.emitter.once("x", self.note(name))
        self.emitter.on("x", self.note("d"))
        self.emitter.emit("x")
        self.assertEqual(self.seen, ["a", "b", "c", "d"])

    def test_removing_itself_skips_nobody(self):
        remove = self.emitter.on("x", lambda: (self.seen.append("a"), remove()))
        self.emitter.on("x", self.note("b"))
        self.emitter.emit("x")
        self.assertEqual(self.seen, ["a", "b"])

    def test_a_removed_one_is_not_called_any_more(self):
        self.emitter.on("x", lambda: remove())
        remove = self.emitter.on("x", self.note("b"))
        self.emitter.emit("x")
        self.assertEqual(self.seen, [])

    def test_an_added_one_waits_for_the_next_emit(self):
        self.emitter.once("x", lambda: self.emitter.on("x", self.note("new")))
        self.emitter.emit("x")
        self.assertEqual(self.seen, [])
        self.emitter.emit("x")
        self.assertEqual(self.seen, ["new"])

    def test_once_is_gone_before_it_is_called(self):
        self.emitter.once("x", lambda: (self.seen.append("a"), self.emitter.emit("x")))
        self.emitter.emit("x")
        self.assertEqual(self.seen, ["a"])

    def test_once_is_gone_after_an_exception(self):
        def broken():
            raise KeyError("x")

        self.emitter.once("x", broken)
        with self.assertRaises(KeyError):
            self.emitter.emit("x")
        self.assertEqual(self.emitter.count("x"), 0)

    def test_methods_can_be_removed(self):
        self.emitter.on("x", self.method)
        self.assertTrue(self.emitter.off("x", self.method))
        self.emitter.emit("x")
        self.assertEqual(self.seen, [])

    def test_the_returned_function_removes_its_own(self):
        listener = self.note("a")
        self.emitter.on("x", listener, priority=1)
        remove = self.emitter.once("x", listener)
        remove()
        remove()
        self.emitter.emit("x")
        self.emitter.emit("x")
        self.assertEqual(self.seen, ["a", "a"])
