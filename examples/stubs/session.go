// Two sequences of a worker in Go: the second gets the first block of the first from the cache (README.md).
//
// go run . HOST:PORT
package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"log"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"

	pb "session/kvpool"
)

const fingerprint = "toy-go"

// pack gives token ids as little-endian uint32.
func pack(tokens []uint32) []byte {
	packed := []byte{}
	for _, token := range tokens {
		packed = binary.LittleEndian.AppendUint32(packed, token)
	}
	return packed
}

func run(manager string) (err error) {
	// Dial and WithInsecure are deprecated but work in every version 1; their replacements need a recent one.
	connection, err := grpc.Dial(manager, grpc.WithInsecure(), grpc.WithDisableRetry(), grpc.WithNoProxy(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(16<<20)))
	if err != nil {
		return err
	}
	defer connection.Close()
	// One deadline for all: the whole is shorter than a lease, so it needs no KeepAlive either.
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	client := pb.NewCacheServiceClient(connection)
	registered, err := client.Register(ctx, &pb.RegisterRequest{
		WorkerId: "go", Incarnation: uint64(time.Now().UnixNano()), RegisterNo: 1, Address: "127.0.0.1:9", ModelFingerprint: fingerprint,
		KvCacheConfig: &pb.KVCacheConfig{
			BlockSize: 4,
			Groups:    []*pb.KVCacheGroup{{Spec: &pb.KVCacheGroup_FullAttention{FullAttention: &pb.FullAttentionSpec{}}}},
			Pools:     []*pb.KVCachePool{{Tier: pb.Tier_TIER_DEVICE, NumBlocks: 9}},
		},
	})
	if err != nil {
		return err
	}
	defer func() {
		request := &pb.DeregisterRequest{Session: registered.Session, SessionKey: registered.SessionKey}
		if _, failed := client.Deregister(ctx, request); err == nil {
			err = failed
		}
	}()
	uplink := &pb.Uplink{Session: registered.Session, SessionKey: registered.SessionKey}
	for _, prompt := range []struct {
		name   string
		tokens []uint32
	}{{"a", []uint32{1, 2, 3, 4, 5, 6}}, {"b", []uint32{1, 2, 3, 4, 9}}} {
		key := &pb.SequenceKey{SequenceId: prompt.name, Attempt: 1}
		item := &pb.AllocateItem{Key: key, Root: &pb.Root{ModelFingerprint: fingerprint}, Tokens: pack(prompt.tokens), MaxNewTokens: 1}
		uplink.CallNo++ // a larger number in each mutating call, one call at a time
		reply, err := client.Allocate(ctx, &pb.AllocateRequest{Uplink: uplink, Items: []*pb.AllocateItem{item}})
		if err != nil {
			return err
		}
		granted := reply.Results[0].GetGranted()
		if granted == nil {
			return fmt.Errorf("%s: %s", prompt.name, reply.Results[0].GetStatus().GetMessage())
		}
		blocks := strings.Trim(fmt.Sprint(granted.Tables[0].BlockIds), "[]")
		fmt.Printf("%s: blocks %s, %d tokens cached\n", prompt.name, blocks, granted.NumCachedTokens)
		// Here an engine computes the KV of the tokens that are not cached. Free reports it as complete, and ends the sequence.
		update := &pb.SequenceUpdate{Key: key, NumComputedTokens: uint32(len(prompt.tokens))}
		uplink.CallNo++
		if _, err := client.Free(ctx, &pb.FreeRequest{Uplink: uplink, Items: []*pb.FreeItem{{Update: update}}}); err != nil {
			return err
		}
	}
	return nil
}

func main() {
	if err := run(os.Args[1]); err != nil {
		log.Fatal(err)
	}
}
