// SPDX-License-Identifier: Apache-2.0
// An object out of a DiskView into a file of its own (object_file.h), and out of one into a tier.
//
// Threads: one.  Memory: the body, and some pages.
#ifndef KVM_TIERS_DISK_OBJECT_TRANSFER_H_
#define KVM_TIERS_DISK_OBJECT_TRANSFER_H_

#include <cstdint>
#include <functional>
#include <string>

#include "base/status.h"
#include "tiers/disk/disk_view.h"
#include "tiers/disk/object_file.h"
#include "tiers/slow_tier.h"

namespace kvm::tiers {

// Called now and then: bytes that are done, of so many.
using TransferProgress = std::function<void(uint64_t n_done, uint64_t n_all)>;

// Writes the object to a file; each page of it is compared with its checksum. Returns the bytes of
// the file. Fails: LOST: not all of it is there; CORRUPT; as ObjectFileWriter. Nothing is left
// then.
Result<uint64_t> export_object(DiskView* view, const FoundObject& object, const std::string& path,
                               bool replaces, const TransferProgress& on_progress);

// What an object of a file takes in a tier: records, headers and all.
uint64_t import_bytes(const ObjectFileHead& head);

// Puts the object of the file into the tier, under a key; one of that key is replaced. When it
// returns no crash takes it any more. What the file says is compared with its checksums once more
// on the way, and nothing is put if it does not match. Fails: as ObjectFileReader::read_pages and
// ObjectRequest; nothing is left of it in the tier then. REQUIRES: the tier has objects().
Status import_object(SlowTier* tier, ObjectFileReader* file, const std::string& key,
                     const TransferProgress& on_progress);

}  // namespace kvm::tiers

#endif  // KVM_TIERS_DISK_OBJECT_TRANSFER_H_
