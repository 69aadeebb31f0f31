"""Tests of the reader of kvm.h that the ABI tests share."""

import unittest

from abi_header import Header

TEXT = """
#define KVM_API __attribute__((x))
#define KVM_POSITION_END (UINT64_MAX)
#define KVM_MACRO(x) x
enum { KVM_A = 1, /* KVM_API kvm_status kvm_comment(void); */ KVM_B };
typedef struct kvm_opaque kvm_opaque;
typedef struct kvm_pair {
  uint32_t struct_size; // not, a, field;
  uint64_t reserved[4];
  const char *name, *other;
  void (*callback)(int level, void *user);
} kvm_pair;
KVM_API kvm_status kvm_one(const kvm_pair *p,
                           void (*f)(int));
KVM_API const char *kvm_two(void);
static inline int kvm_inline(void) { return 0; }
"""


class HeaderReaderTest(unittest.TestCase):
    def test_reads_everything_once(self):
        header = Header(TEXT)
        self.assertEqual(header.functions, ["kvm_one", "kvm_two"])
        self.assertEqual(header.structs, [("kvm_pair", ["struct_size", "reserved", "name", "other",
                                                        "callback"])])
        self.assertEqual(header.constants, ["KVM_A", "KVM_B", "KVM_POSITION_END"])

    def test_refuses_what_it_does_not_understand(self):
        with self.assertRaises(ValueError):
            Header("typedef struct kvm_x { union { int a; } u; } kvm_x;")


if __name__ == "__main__":
    unittest.main()
