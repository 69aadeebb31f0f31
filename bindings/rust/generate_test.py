"""generate.py finds what changed in a header, and refuses what it does not understand.

Usage: generate_test.py HEADER CRATE"""

import contextlib
import io
import os
import sys
import tempfile
import unittest

import generate

HEADER, CRATE = sys.argv[1:3]


class GenerateTest(unittest.TestCase):
    def setUp(self):
        with open(HEADER, encoding="utf-8") as file:
            self.text = file.read()

    def check(self, old, new):
        """The status of --check, and what it prints, for a header in which `old` became `new`."""
        self.assertIn(old, self.text)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "kvm.h")
            with open(path, "w", encoding="utf-8") as file:
                file.write(self.text.replace(old, new, 1))
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                status = generate.main(path, CRATE, "--check")
            return status, printed.getvalue()

    def test_changes_are_found(self):
        self.assertEqual(self.check("kvm_submit", "kvm_submit")[0], 0)
        for old, new, seen in [
                ("KVM_ERR_HOLE = -7", "KVM_ERR_HOLE = -8", "KVM_ERR_HOLE: kvm_status = -8"),
                ("uint32_t n_exact;", "float n_exact;", "n_exact: f32"),
                ("uint64_t where;", "uint64_t whence;", "whence"),
                ("uint64_t seed;     /* of sampling", "uint64_t seed[2]; /* of sampling",
                 "seed: [u64; 2]"),
                ("kvm_queue_fd(kvm_queue *queue)", "kvm_queue_fd(const kvm_queue *queue)",
                 "queue: *const kvm_queue"),
                ("KVM_API kvm_status kvm_submit", "KVM_API int32_t kvm_submit",
                 "kvm_submit(queue: *mut kvm_queue) -> i32"),
        ]:
            with self.subTest(new):
                status, printed = self.check(old, new)
                self.assertEqual(status, 1)
                self.assertIn(seen, printed)

    def test_comments_change_nothing(self):
        self.assertEqual(self.check("/* KVM_OK or one of", "/* KVM_NO or one of")[0], 0)

    def test_what_is_not_understood_is_refused(self):
        for old, new in [
                ("uint32_t n_exact;", "long n_exact;"),
                ("uint32_t n_exact;", "union { int a; float b; } n_exact;"),
                ("uint32_t n_exact;", "uint32_t n_exact : 3;"),
                ("KVM_API kvm_status kvm_submit", "KVM_API struct other *kvm_submit"),
                ("typedef uint64_t kvm_seq_id;", "typedef unsigned long kvm_seq_id;"),
        ]:
            with self.subTest(new):
                with self.assertRaises(ValueError):
                    self.check(old, new)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
